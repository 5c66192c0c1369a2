"""The collectives without a root: all-gather, reduce-scatter, all-to-all, barrier.

All-gather and reduce-scatter are the halves of an all-reduce (chapter 03); ZeRO and
FSDP use them for sharded weights and gradients (chapters 07 and 08). All-to-all sends
the tokens of a mixture of experts to the ranks with these experts. Explained in chapter
02.
"""

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ddp_course.collectives.call import Collective, tensor_text
from ddp_course.collectives.catalog import (
    all_gather_ring_plan,
    all_to_all_plan,
    barrier_plan,
    reduce_scatter_direct_plan,
)
from ddp_course.collectives.communicator import Group, Work
from ddp_course.collectives.meeting import CollectiveError
from ddp_course.collectives.reduction import Op, ReduceOp
from ddp_course.collectives.runtime import Buffer


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Gather `tensor` of the group's r-th rank into `tensor_list[r]` of every rank.

    All tensors have the same shape and type. The messages go around a ring. Raises
    CollectiveError. Chapter 02.
    """
    call = Collective(group, "all_gather")
    call.tensor("tensor", tensor)
    call.tensors("tensor_list", tensor_list, like=tensor)

    def body() -> None:
        tensor_list[call.rank].copy_(tensor)
        call.carry_out(all_gather_ring_plan(call.size), Buffer.pieces(tensor_list))

    return call.start(body, async_op)


def all_gather_single(
    output: Tensor, input: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Gather the inputs of all ranks, one after the other, into `output`.

    `output` has world_size times as many elements as `input`; if `input` already is
    this rank's part of `output`, nothing is copied. Raises CollectiveError.
    """
    call = Collective(group, "all_gather_single")
    call.tensor("input", input)
    call.check_multiple("output", output, "input", input)

    def body() -> None:
        buffer = Buffer.flat(output, call.size)
        mine = buffer.chunk(call.rank)
        if mine.data_ptr() != input.data_ptr():
            mine.copy_(input.view(-1))
        call.carry_out(all_gather_ring_plan(call.size), buffer)

    return call.start(body, async_op)


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce all ranks' `input_list[r]` into `output` of the group's r-th rank.

    All tensors have the same shape and type; the inputs do not change. Raises
    CollectiveError. Chapter 02.
    """
    call = Collective(group, "reduce_scatter")
    call.tensor("output", output)
    call.tensors("input_list", input_list, like=output)
    return _reduce_scatter(call, output, lambda: input_list, op, async_op)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Reduce all ranks' `input`; the r-th rank gets the r-th part, in `output`.

    `input` has world_size times as many elements as `output`, and does not change.
    Raises CollectiveError. Chapter 02.
    """
    call = Collective(group, "reduce_scatter_single")
    call.tensor("output", output)
    call.check_multiple("input", input, "output", output)
    return _reduce_scatter(
        call, output, lambda: input.view(-1).tensor_split(call.size), op, async_op
    )


def _reduce_scatter(
    call: Collective, output: Tensor, inputs: Callable, op: Any, async_op: bool
) -> Work | None:
    """Check op and memory, and start; `inputs()` returns this rank's chunks."""
    call.reduction(op, output)
    if not call.problem:
        others = (chunk for r, chunk in enumerate(inputs()) if r != call.rank)
        if any(_overlap(output, chunk) for chunk in others):
            call.refuse(
                "output shares memory with another rank's part of the input, which "
                "would be overwritten before it is sent; pass another tensor"
            )

    def body() -> None:
        chunks = list(inputs())
        output.view(-1).copy_(chunks[call.rank].view(-1))
        chunks[call.rank] = output
        call.carry_out(reduce_scatter_direct_plan(call.size), Buffer.pieces(chunks))

    return call.start(body, async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Exchange the parts of a tensor: part j of `input` goes to the j-th rank.

    A part is some rows, elements of dimension 0. `input_split_sizes[j]` rows go to the
    j-th rank, and `output_split_sizes[i]` rows of `output` come from the i-th; they may
    be 0. Without sizes, all parts are equal: the number of ranks must divide the rows.
    The rows of all ranks have the same shape and type. Raises CollectiveError, also if
    a rank sends more or fewer rows than the receiver takes. Chapter 02.
    """
    call = Collective(group, "all_to_all_single")
    n, me = call.size, call.rank
    sizes: dict[str, list[int]] = {}
    for role, tensor, split in (
        ("input", input, input_split_sizes),
        ("output", output, output_split_sizes),
    ):
        if call.check_usable(role, tensor):
            sizes[role] = _split_sizes(call, role, tensor, split)
    if not call.problem:
        row, other = input.shape[1:], output.shape[1:]
        call.words.append(tensor_text("rows", input.dtype, row))
        if (row, input.dtype) != (other, output.dtype):
            call.refuse(
                f"input's rows are {input.dtype} {list(row)}, and output's "
                f"{output.dtype} {list(other)}; they must be alike"
            )
        elif _overlap(output, input):
            call.refuse("output and input share memory; pass two tensors")

    def body() -> None:
        _compare_parts(call, call.agree(show=[sizes["input"], sizes["output"]]))
        takes, gives = output.split(sizes["output"]), input.split(sizes["input"])
        takes[me].copy_(gives[me])
        chunks: list[Tensor | None] = [None] * (n * n)
        chunks[me * n : me * n + n] = gives
        chunks[me : n * n : n] = takes
        call.carry_out(all_to_all_plan(n), Buffer.pieces(chunks))

    return call.start(body, async_op, agreed_by_body=True)


def _split_sizes(
    call: Collective, role: str, tensor: Tensor, split: Sequence[int] | None
) -> list[int]:
    """Return how many rows of a tensor each rank sends or takes, or refuse the call."""
    n, shape = call.size, list(tensor.shape)
    try:
        sizes = [index(size) for size in (() if split is None else split)]
    except TypeError:
        it_must = "it must be a list of whole numbers, or None"
        call.refuse(f"{role}_split_sizes is {split!r}; {it_must}")
        return [0] * n
    if not shape or (not sizes and shape[0] % n):
        call.refuse(
            f"{role} {shape} cannot be cut into {n} equal parts; "
            f"{role}_split_sizes says how many rows each rank has"
        )
    elif sizes and (len(sizes) != n or min(sizes) < 0 or sum(sizes) != shape[0]):
        call.refuse(
            f"{role}_split_sizes is {sizes}; it must be {n} numbers of rows, 0 or "
            f"more, with the sum {shape[0]}"
        )
    return sizes or [shape[0] // n if shape else 0] * n


def _compare_parts(call: Collective, shown: Sequence[Sequence[list[int]]]) -> None:
    """Raise CollectiveError, on all ranks, unless receivers take what is sent."""
    ranks = call.comm.ranks
    for i, (sent, _) in enumerate(shown):
        for j, (_, taken) in enumerate(shown):
            if sent[j] != taken[i]:
                raise CollectiveError(
                    f"rank {ranks[i]} sends {sent[j]} rows to rank {ranks[j]}, which "
                    f"takes {taken[i]}. Nothing was sent."
                )


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    (a, a_size), (b, b_size) = ((t.data_ptr(), t.nbytes) for t in (a, b))
    return max(a, b) < min(a + a_size, b + b_size)


def barrier(group: Group = None, async_op: bool = False) -> Work | None:
    """Wait until every rank of `group` has called this. Chapter 02."""
    call = Collective(group, "barrier")

    def body() -> None:
        where = "cpu" if "cpu" in call.endpoint.backends else "cuda"  # NCCL alone
        token = torch.zeros(1, dtype=torch.uint8, device=where)
        plan = barrier_plan(call.size)
        call.carry_out(plan, Buffer.flat(token, 1), ReduceOp.MAX)

    return call.start(body, async_op)
