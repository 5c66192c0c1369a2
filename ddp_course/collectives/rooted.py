"""The collectives with a root: broadcast, reduce, scatter and gather.

One rank, the root, has something for all others or gets something from all of them. It
is a rank of the whole job, as in `torch.distributed`. Explained in chapter 02.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from ddp_course.collectives.call import Collective
from ddp_course.collectives.communicator import Group, Work
from ddp_course.collectives.plan import Plan, Transfer, backwards, make_plan
from ddp_course.collectives.reduction import Op, ReduceOp
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
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "tree",
) -> Work | None:
    """Give every rank of `group` what rank `src` has in `tensor` (any shape, in place).

    With `async_op` it returns at once, with a handle to wait for. `algorithm` is "tree"
    or "naive". Raises CollectiveError, on every rank, if the ranks' calls do not fit
    together. Chapter 02.
    """
    call = Collective(group, "broadcast", algorithm=algorithm, src=src)
    call.tensor("tensor", tensor)
    call.choice("algorithm", algorithm, BROADCASTS)
    root = call.root("src", src)

    def body() -> None:
        plan = BROADCASTS[algorithm](call.size, root)
        call.carry_out(plan, Buffer.flat(tensor, 1))

    return call.start(body, async_op)


@cache
def reduce_naive_plan(world_size: int, root: int = 0) -> Plan:
    """Rank `root` receives from one rank after the other, and adds what it gets."""
    there = broadcast_naive_plan(world_size, root)
    return backwards(there, "reduce, naive", reduce=True)


@cache
def reduce_tree_plan(world_size: int, root: int = 0) -> Plan:
    """In each step half of those who still have something pass it on to the others.

    ceil(log2(world_size)) steps along a binomial tree.
    """
    there = broadcast_tree_plan(world_size, root)
    return backwards(there, "reduce, tree", reduce=True)


def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the ranks' tensors (any shape) in `tensor` of rank `dst`, in place.

    The other ranks keep theirs as they are. It goes along a tree; the rest is as for
    `all_reduce`. Raises CollectiveError. Chapter 02.
    """
    call = Collective(group, "reduce", dst=dst)
    call.tensor("tensor", tensor)
    call.reduction(op, tensor)
    root = call.root("dst", dst)

    def body() -> None:
        plan = reduce_tree_plan(call.size, root)
        passes_on = call.rank != root and bool(plan.received_by(call.rank))
        buffer = Buffer.flat(tensor.clone() if passes_on else tensor, 1)
        call.carry_out(plan, buffer)

    return call.start(body, async_op)


@cache
def scatter_plan(world_size: int, root: int = 0) -> Plan:
    """Rank `root` sends chunk r to rank r, to one rank after the other."""
    n = world_size
    others = [(root + k) % n for k in range(1, n)]
    transfers = [Transfer(k, root, r, r, r + 1, False) for k, r in enumerate(others)]
    start = [range(n) if r == root else () for r in range(n)]
    return make_plan("scatter", n, n, transfers, start, end=[{r} for r in range(n)])


@cache
def gather_plan(world_size: int, root: int = 0) -> Plan:
    """Rank r sends chunk r to `root`, one rank after the other."""
    return backwards(scatter_plan(world_size, root), "gather", reduce=False)


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Put `scatter_list[r]` of rank `src` into `tensor` of the group's r-th rank.

    Rank `src` gives as many tensors as the group has ranks, each like `tensor`; the
    other ranks give none. Raises CollectiveError. Chapter 02.
    """
    call = Collective(group, "scatter", src=src)
    return _start_with_list(call, tensor, src, scatter_list, async_op)


def gather(
    tensor: Tensor,
    gather_list: Sequence[Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Put `tensor` of the group's r-th rank into `gather_list[r]` of rank `dst`.

    Rank `dst` gives as many tensors as the group has ranks, each like `tensor`; the
    other ranks give none. Raises CollectiveError. Chapter 02.
    """
    call = Collective(group, "gather", dst=dst)
    return _start_with_list(call, tensor, dst, gather_list, async_op)


def _start_with_list(
    call: Collective, tensor: Tensor, rank: int, rows: Any, async_op: bool
) -> Work | None:
    """Check and start a scatter or gather: only rank `rank`, the root, has `rows`.

    One for each rank of the group: its `tensor`, before a gather or after a scatter.
    """
    is_scatter = call.name == "scatter"
    call.tensor("tensor", tensor)
    root = call.root("src" if is_scatter else "dst", rank)
    if call.rank == root:
        call.tensors(f"{call.name}_list", rows, like=tensor)
    elif rows is not None and len(rows):
        call.refuse(f"{call.name}_list is given, but only rank {rank} {call.name}s")

    def body() -> None:
        chunks: list[Tensor | None] = [None] * call.size
        if call.rank == root:
            chunks = list(rows)
            own = chunks[root]
            (tensor if is_scatter else own).copy_(own if is_scatter else tensor)
        else:
            chunks[call.rank] = tensor
        plan = scatter_plan if is_scatter else gather_plan
        call.carry_out(plan(call.size, root), Buffer.pieces(chunks))

    return call.start(body, async_op)
