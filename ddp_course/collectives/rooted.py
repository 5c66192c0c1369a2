"""The collectives with a root: broadcast, reduce, scatter and gather.

One rank, the root, sends to all others or receives from all of them. It is a global
rank, as in `torch.distributed`. Explained in chapter 02.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ddp_course.collectives.call import Collective
from ddp_course.collectives.catalog import (
    broadcast_naive_plan,
    broadcast_tree_plan,
    gather_plan,
    reduce_tree_plan,
    scatter_plan,
)
from ddp_course.collectives.communicator import Group, Work
from ddp_course.collectives.reduction import Op, ReduceOp
from ddp_course.collectives.runtime import Buffer

BROADCASTS = {"naive": broadcast_naive_plan, "tree": broadcast_tree_plan}


def broadcast(
    tensor: Tensor,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "tree",
) -> Work | None:
    """Broadcast `tensor` (any shape, in place) from rank `src` to all ranks of `group`.

    With `async_op` the call returns a handle at once. `algorithm` is "tree" or "naive".
    Raises CollectiveError, on every rank, if the ranks' calls differ. Chapter 02.
    """
    call = Collective(group, "broadcast", algorithm=algorithm, src=src)
    call.tensor("tensor", tensor)
    call.choice("algorithm", algorithm, BROADCASTS)
    root = call.root("src", src)

    def body() -> None:
        plan = BROADCASTS[algorithm](call.size, root)
        call.carry_out(plan, Buffer.flat(tensor, 1))

    return call.start(body, async_op)


def reduce(
    tensor: Tensor,
    dst: int = 0,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce the ranks' tensors (any shape) into `tensor` of rank `dst`, in place.

    The other ranks' tensors do not change. The messages go along a tree; the arguments
    are those of `all_reduce`. Raises CollectiveError. Chapter 02.
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


def scatter(
    tensor: Tensor,
    scatter_list: Sequence[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send `scatter_list[r]` of rank `src` to `tensor` of the group's r-th rank.

    Rank `src` passes as many tensors as the group has ranks, each like `tensor`; the
    other ranks pass None. Raises CollectiveError. Chapter 02.
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
    """Send `tensor` of the group's r-th rank to `gather_list[r]` of rank `dst`.

    Rank `dst` passes as many tensors as the group has ranks, each like `tensor`; the
    other ranks pass None. Raises CollectiveError. Chapter 02.
    """
    call = Collective(group, "gather", dst=dst)
    return _start_with_list(call, tensor, dst, gather_list, async_op)


def _start_with_list(
    call: Collective, tensor: Tensor, rank: int, rows: Any, async_op: bool
) -> Work | None:
    """Check and start a scatter or gather; only rank `rank`, the root, has `rows`.

    There is a row for each rank: its `tensor` before a gather or after a scatter.
    """
    is_scatter = call.name == "scatter"
    call.tensor("tensor", tensor)
    root = call.root("src" if is_scatter else "dst", rank)
    if call.rank == root:
        call.tensors(f"{call.name}_list", rows, like=tensor)
    elif rows is not None and not (isinstance(rows, Sequence) and len(rows) == 0):
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
