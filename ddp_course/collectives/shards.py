"""All-gather and reduce-scatter: everyone's shards to everyone, and back to shards.

They are the two halves of a ring all-reduce (chapter 03), and what ZeRO and FSDP do
with sharded weights and gradients (chapters 07 and 08). Explained in chapter 02.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.call import Call, Run
from ddp_course.collectives.communicator import Work, communicator
from ddp_course.collectives.plan import Plan, Transfer, make_plan
from ddp_course.collectives.reduction import ReduceOp
from ddp_course.collectives.runtime import Buffer


@cache
def all_gather_ring_plan(world_size: int) -> Plan:
    """Every rank passes on to its right what it has just received from its left.

    In step k rank r sends chunk r - k to rank r + 1: world_size - 1 steps.
    """
    n = world_size
    transfers = [
        Transfer(k, r, (r + 1) % n, (r - k) % n, (r - k) % n + 1, False)
        for k in range(n - 1)
        for r in range(n)
    ]
    return make_plan("all_gather, ring", n, n, transfers, start=[{r} for r in range(n)])


@cache
def all_gather_direct_plan(world_size: int) -> Plan:
    """Every rank sends its chunk to every other rank itself: as many bytes, no wait.

    All messages are independent, so all are under way at once. To whom each rank sends
    first differs, or all would begin with the same rank.
    """
    n = world_size
    transfers = [
        Transfer(k - 1, r, (r + k) % n, r, r + 1, False)
        for k in range(1, n)
        for r in range(n)
    ]
    start = [{r} for r in range(n)]
    return make_plan("all_gather, direct", n, n, transfers, start)


ALL_GATHERS = {"ring": all_gather_ring_plan, "direct": all_gather_direct_plan}


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str = "ring",
) -> Work | None:
    """Put `tensor` of the group's r-th rank into `tensor_list[r]` of every rank.

    All tensors have one shape and type. `algorithm` is "ring" or "direct". Raises
    CollectiveError. Chapter 02.
    """
    comm = communicator(group)
    call = Call(comm, "all_gather", algorithm=algorithm)
    call.tensor("tensor", tensor)
    call.tensors("tensor_list", tensor_list, like=tensor)
    call.choice("algorithm", algorithm, ALL_GATHERS)

    def body(run: Run) -> None:
        tensor_list[comm.rank].copy_(tensor)
        run.plan(ALL_GATHERS[algorithm](comm.size), Buffer.pieces(tensor_list))

    return call.start(body, async_op)


def all_gather_single(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str = "ring",
) -> Work | None:
    """Put the inputs of all ranks one after the other into `output` of every rank.

    `output` has world_size times as many elements as `input`; if `input` already is
    this rank's part of `output`, nothing is copied. Raises CollectiveError.
    """
    comm = communicator(group)
    call = Call(comm, "all_gather_single", algorithm=algorithm)
    call.tensor("input", input)
    call.times("output", output, comm.size, "input", input)
    call.choice("algorithm", algorithm, ALL_GATHERS)

    def body(run: Run) -> None:
        buffer = Buffer.flat(output, comm.size)
        mine = buffer.chunk(comm.rank)
        if mine.data_ptr() != input.data_ptr():
            mine.copy_(input.view(-1))
        run.plan(ALL_GATHERS[algorithm](comm.size), buffer)

    return call.start(body, async_op)


@cache
def reduce_scatter_ring_plan(world_size: int) -> Plan:
    """Every rank passes on to its right the sum that it has just added its own to.

    In step k rank r sends chunk r - 1 - k to rank r + 1, which adds it. The sum of
    chunk c sets out from rank c + 1 and arrives, complete, at rank c.
    """
    n = world_size
    transfers = [
        Transfer(k, r, (r + 1) % n, (r - 1 - k) % n, (r - 1 - k) % n + 1, True)
        for k in range(n - 1)
        for r in range(n)
    ]
    end = [{r} for r in range(n)]
    return make_plan("reduce_scatter, ring", n, n, transfers, end=end)


@cache
def reduce_scatter_direct_plan(world_size: int) -> Plan:
    """Every rank sends every other rank its chunk, and adds what it receives.

    As many bytes as around the ring, but no message waits for another.
    """
    n = world_size
    transfers = [
        Transfer(k - 1, r, (r + k) % n, (r + k) % n, (r + k) % n + 1, True)
        for k in range(1, n)
        for r in range(n)
    ]
    end = [{r} for r in range(n)]
    return make_plan("reduce_scatter, direct", n, n, transfers, end=end)


REDUCE_SCATTERS = {
    "ring": reduce_scatter_ring_plan,
    "direct": reduce_scatter_direct_plan,
}


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str = "direct",
) -> Work | None:
    """Combine all ranks' `input_list[r]` in `output` of the group's r-th rank.

    All tensors have one shape and type; the inputs stay as they are. `algorithm` is
    "direct" or "ring". Raises CollectiveError. Chapter 02.
    """
    comm = communicator(group)
    call = Call(comm, "reduce_scatter", algorithm=algorithm)
    call.tensor("output", output)
    call.tensors("input_list", input_list, like=output)
    return _reduce_scatter(
        call, output, lambda: list(input_list), op, async_op, algorithm
    )


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    algorithm: str = "direct",
) -> Work | None:
    """Combine all ranks' `input`; the r-th rank gets the r-th part, in `output`.

    `input` has world_size times as many elements as `output`, and stays as it is.
    Raises CollectiveError. Chapter 02.
    """
    comm = communicator(group)
    call = Call(comm, "reduce_scatter_single", algorithm=algorithm)
    call.tensor("output", output)
    call.times("input", input, comm.size, "output", output)

    def parts() -> list[Tensor]:
        return list(input.view(-1).chunk(comm.size)) or [input] * comm.size

    return _reduce_scatter(call, output, parts, op, async_op, algorithm)


def _reduce_scatter(
    call: Call, output: Tensor, parts, op, async_op: bool, algorithm: str
) -> Work | None:
    comm = call.comm
    call.reduction(op, output)
    call.choice("algorithm", algorithm, REDUCE_SCATTERS)

    def body(run: Run) -> None:
        chunks = parts()
        if algorithm == "ring":  # sums grow in every chunk: on a copy
            chunks = [torch.clone(chunk) for chunk in chunks]
        output.view(-1).copy_(chunks[comm.rank].view(-1))
        chunks[comm.rank] = output
        run.plan(REDUCE_SCATTERS[algorithm](comm.size), Buffer.pieces(chunks))

    return call.start(body, async_op)
