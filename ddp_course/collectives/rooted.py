"""The collectives with a root: broadcast, reduce, scatter and gather.

One rank, the root, has something for all others or gets something from all of them.
Explained in chapter 02.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.call import Call, Run
from ddp_course.collectives.communicator import Work, communicator
from ddp_course.collectives.plan import Plan, Transfer, make_plan
from ddp_course.collectives.reduction import ReduceOp
from ddp_course.collectives.runtime import Buffer


@cache
def broadcast_naive_plan(world_size: int, root: int = 0) -> Plan:
    """Rank `root` sends everything to one rank after the other.

    In step k it serves the k-th of the others: world_size - 1 steps.
    """
    others = [(root + k) % world_size for k in range(1, world_size)]
    transfers = [Transfer(k, root, dst, 0, 1, False) for k, dst in enumerate(others)]
    return _broadcast(root, "broadcast, naive", world_size, transfers)


@cache
def broadcast_tree_plan(world_size: int, root: int = 0) -> Plan:
    """Whoever has it passes it on: the number of those who have it doubles each step.

    A binomial tree, ceil(log2(world_size)) steps: counted from the root, rank r sends
    to rank r + d, for d = ..., 4, 2, 1 (Thakur et al. 2005).
    """
    steps, transfers = (world_size - 1).bit_length(), []
    for step in range(steps):
        distance = 2 ** (steps - 1 - step)
        for r in range(0, world_size - distance, 2 * distance):
            src, dst = (r + root) % world_size, (r + distance + root) % world_size
            transfers.append(Transfer(step, src, dst, 0, 1, False))
    return _broadcast(root, "broadcast, tree", world_size, transfers)


def _broadcast(
    root: int, name: str, world_size: int, transfers: list[Transfer]
) -> Plan:
    start = [{0} if rank == root else () for rank in range(world_size)]
    return make_plan(name, world_size, 1, transfers, start)


BROADCASTS = {"naive": broadcast_naive_plan, "tree": broadcast_tree_plan}


def broadcast(
    tensor: Tensor,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str = "tree",
) -> Work | None:
    """Give every rank of `group` what rank `src` has in `tensor` (any shape, in place).

    `src` is a rank of the whole job, as in `torch.distributed.broadcast`. With
    `async_op` it returns at once, with a handle to wait for. `algorithm` is "tree" or
    "naive". Raises CollectiveError, on every rank, if the ranks' calls do not fit
    together. Chapter 02.
    """
    comm = communicator(group)
    call = Call(comm, "broadcast", algorithm=algorithm, src=src)
    call.tensor("tensor", tensor)
    call.choice("algorithm", algorithm, BROADCASTS)
    root = call.root("src", src)

    def body(run):
        plan = BROADCASTS[algorithm](comm.size, root)
        run.plan(plan, Buffer.flat(tensor, plan.chunks))

    return call.start(body, async_op)


@cache
def reduce_naive_plan(world_size: int, root: int = 0) -> Plan:
    """Rank `root` receives from one rank after the other, and adds what it gets."""
    return _reversed("reduce, naive", broadcast_naive_plan(world_size, root), root)


@cache
def reduce_tree_plan(world_size: int, root: int = 0) -> Plan:
    """In each step half of those who still have something pass it on to the others.

    ceil(log2(world_size)) steps along a binomial tree.
    """
    return _reversed("reduce, tree", broadcast_tree_plan(world_size, root), root)


def _reversed(name: str, plan: Plan, root: int) -> Plan:
    """Turn every message of a broadcast round, and run the steps backwards."""
    transfers = [
        replace(t, step=plan.steps - 1 - t.step, src=t.dst, dst=t.src, reduce=True)
        for t in plan.transfers
    ]
    end = [{0} if rank == root else () for rank in range(plan.world_size)]
    return make_plan(name, plan.world_size, 1, transfers, end=end)


REDUCES = {"naive": reduce_naive_plan, "tree": reduce_tree_plan}


def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str = "tree",
) -> Work | None:
    """Combine the ranks' tensors (any shape) in `tensor` of rank `dst`, in place.

    `dst` is a rank of the whole job; the other ranks keep theirs as they are. The rest
    is as for `all_reduce`. Raises CollectiveError. Chapter 02.
    """
    comm = communicator(group)
    call = Call(comm, "reduce", algorithm=algorithm, dst=dst)
    call.tensor("tensor", tensor)
    call.reduction(op, tensor)
    call.choice("algorithm", algorithm, REDUCES)
    root = call.root("dst", dst)

    def body(run: Run) -> None:
        plan = REDUCES[algorithm](comm.size, root)
        passes_on = comm.rank != root and bool(plan.received_by(comm.rank))
        run.plan(plan, Buffer.flat(tensor.clone() if passes_on else tensor, 1))

    return call.start(body, async_op)


@cache
def scatter_plan(world_size: int, root: int = 0) -> Plan:
    """Rank `root` sends chunk r to rank r, to one rank after the other."""
    others = [(root + k) % world_size for k in range(1, world_size)]
    return make_plan(
        "scatter",
        world_size,
        world_size,
        [Transfer(k, root, r, r, r + 1, False) for k, r in enumerate(others)],
        start=[range(world_size) if r == root else () for r in range(world_size)],
        end=[{r} for r in range(world_size)],
    )


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put `scatter_list[r]` of rank `src` into `tensor` of the group's r-th rank.

    Rank `src`, a rank of the whole job, gives as many tensors as the group has ranks,
    each like `tensor`; the other ranks give none. Raises CollectiveError. Chapter 02.
    """
    call = Call(communicator(group), "scatter", src=src)
    return _start_with_list(call, tensor, src, scatter_list, async_op)


@cache
def gather_plan(world_size: int, root: int = 0) -> Plan:
    """Rank r sends chunk r to `root`, one rank after the other."""
    n, out = world_size, scatter_plan(world_size, root)
    back = [replace(t, src=t.dst, dst=t.src) for t in out.transfers]
    return make_plan("gather", n, n, back, start=out.end, end=out.start)


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put `tensor` of the group's r-th rank into `gather_list[r]` of rank `dst`.

    Rank `dst`, a rank of the whole job, gives as many tensors as the group has ranks,
    each like `tensor`; the other ranks give none. Raises CollectiveError. Chapter 02.
    """
    call = Call(communicator(group), "gather", dst=dst)
    return _start_with_list(call, tensor, dst, gather_list, async_op)


def _start_with_list(
    call: Call, tensor: Tensor, rank: int, rows: Sequence[Tensor] | None, async_op: bool
) -> Work | None:
    """Check and start a scatter or gather: only rank `rank`, the root, has `rows`.

    One for each rank of the group: its `tensor`, before a gather or after a scatter.
    """
    comm, is_scatter = call.comm, call.name == "scatter"
    call.tensor("tensor", tensor)
    root = call.root("src" if is_scatter else "dst", rank)
    if comm.rank == root:
        call.tensors(f"{call.name}_list", rows, like=tensor)
    elif rows is not None and len(rows):
        call.refuse(f"{call.name}_list is given, but only rank {rank} {call.name}s")

    def body(run: Run) -> None:
        chunks: list[Tensor | None] = [None] * comm.size
        if comm.rank == root:
            chunks = list(rows)
            own = chunks[root]
            (tensor if is_scatter else own).copy_(own if is_scatter else tensor)
        else:
            chunks[comm.rank] = tensor
        plan = scatter_plan if is_scatter else gather_plan
        run.plan(plan(comm.size, root), Buffer.pieces(chunks))

    return call.start(body, async_op)
