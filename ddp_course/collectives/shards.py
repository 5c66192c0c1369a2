"""All-gather and reduce-scatter: everyone's shards to everyone, and back to shards.

They are the two halves of a ring all-reduce (chapter 03), and what ZeRO and FSDP do
with sharded weights and gradients (chapters 07 and 08). Explained in chapter 02.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

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


def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put `tensor` of the group's r-th rank into `tensor_list[r]` of every rank.

    All tensors have one shape and type. It goes around a ring. Raises CollectiveError.
    Chapter 02.
    """
    comm = communicator(group)
    call = Call(comm, "all_gather")
    call.tensor("tensor", tensor)
    call.tensors("tensor_list", tensor_list, like=tensor)

    def body(run: Run) -> None:
        tensor_list[comm.rank].copy_(tensor)
        run.plan(all_gather_ring_plan(comm.size), Buffer.pieces(tensor_list))

    return call.start(body, async_op)


def all_gather_single(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put the inputs of all ranks one after the other into `output` of every rank.

    `output` has world_size times as many elements as `input`; if `input` already is
    this rank's part of `output`, nothing is copied. Raises CollectiveError.
    """
    comm = communicator(group)
    call = Call(comm, "all_gather_single")
    call.tensor("input", input)
    call.times("output", output, comm.size, "input", input)

    def body(run: Run) -> None:
        buffer = Buffer.flat(output, comm.size)
        mine = buffer.chunk(comm.rank)
        if mine.data_ptr() != input.data_ptr():
            mine.copy_(input.view(-1))
        run.plan(all_gather_ring_plan(comm.size), buffer)

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


def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine all ranks' `input_list[r]` in `output` of the group's r-th rank.

    All tensors have one shape and type; the inputs stay as they are, since every rank
    sends them itself. Raises CollectiveError. Chapter 02.
    """
    call = Call(communicator(group), "reduce_scatter")
    call.tensor("output", output)
    call.tensors("input_list", input_list, like=output)
    return _reduce_scatter(call, output, lambda: input_list, op, async_op)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine all ranks' `input`; the r-th rank gets the r-th part, in `output`.

    `input` has world_size times as many elements as `output`, and stays as it is.
    Raises CollectiveError. Chapter 02.
    """
    comm = communicator(group)
    call = Call(comm, "reduce_scatter_single")
    call.tensor("output", output)
    call.times("input", input, comm.size, "output", output)

    def inputs() -> Sequence[Tensor]:
        return input.view(comm.size, output.numel()).unbind()

    return _reduce_scatter(call, output, inputs, op, async_op)


def _reduce_scatter(
    call: Call, output: Tensor, inputs: Callable, op: Any, async_op: bool
) -> Work | None:
    """Check the op and start; `inputs()` are this rank's chunks, if all is well."""
    call.reduction(op, output)

    def body(run: Run) -> None:
        rank, chunks = run.comm.rank, list(inputs())
        output.view(-1).copy_(chunks[rank].view(-1))
        chunks[rank] = output
        run.plan(reduce_scatter_direct_plan(run.comm.size), Buffer.pieces(chunks))

    return call.start(body, async_op)
