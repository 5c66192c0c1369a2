"""All-to-all, where every rank has something for every rank, and the barrier.

Explained in chapter 02. Mixtures of experts use all-to-all to bring each token to the
rank that has its expert.
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
def all_to_all_plan(world_size: int) -> Plan:
    """In step k every rank sends to the rank k further, and receives from k before.

    Chunk i * n + j is what rank i has for rank j: world_size - 1 steps.
    """
    n = world_size
    transfers = [
        Transfer(k - 1, i, j, i * n + j, i * n + j + 1, False)
        for k in range(1, n)
        for i in range(n)
        for j in [(i + k) % n]
    ]
    start = [range(i * n, i * n + n) for i in range(n)]
    end = [range(j, n * n, n) for j in range(n)]
    return make_plan("all_to_all", n, n * n, transfers, start, end)


def all_to_all(
    output_list: Sequence[Tensor],
    input_list: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put `input_list[j]` of the group's i-th rank into `output_list[i]` of its j-th.

    The shapes may differ from pair to pair, as long as the two ranks of a pair agree.
    Raises CollectiveError. Chapter 02.
    """
    comm = communicator(group)
    call = Call(comm, "all_to_all")
    call.pairs(output_list, input_list)

    def body(run: Run) -> None:
        n, me = comm.size, comm.rank
        output_list[me].copy_(input_list[me])
        chunks: list[Tensor | None] = [None] * (n * n)
        chunks[me * n : me * n + n] = input_list
        chunks[me : n * n : n] = output_list
        run.plan(all_to_all_plan(n), Buffer.pieces(chunks))

    return call.start(body, async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Exchange the parts of one tensor: part j of `input` goes to the j-th rank.

    Both are divided along their first dimension: equally, or into parts of the given
    sizes. Raises CollectiveError. Chapter 02.
    """
    comm = communicator(group)
    call = Call(comm, "all_to_all_single")
    outputs = call.split("output", output, output_split_sizes)
    inputs = call.split("input", input, input_split_sizes)
    if call.problem:
        return call.start(lambda run: None)  # raises on every rank
    return all_to_all(outputs, inputs, group, async_op)


@cache
def barrier_plan(world_size: int) -> Plan:
    """In step k every rank tells the rank 2^k further all of whom it has heard.

    After ceil(log2(world_size)) steps all have heard of all (dissemination barrier:
    Hensgen, Finkel and Manber 1988). To hear of someone twice does no harm.
    """
    n = world_size
    transfers = [
        Transfer(k, r, (r + 2**k) % n, 0, 1, True)
        for k in range((n - 1).bit_length())
        for r in range(n)
    ]
    return make_plan("barrier", n, 1, transfers, idempotent=True)


def barrier(
    group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Return when every rank of `group` has called this. Chapter 02."""
    comm = communicator(group)

    def body(run: Run) -> None:
        token = torch.zeros(1, dtype=torch.uint8)
        run.plan(barrier_plan(comm.size), Buffer.flat(token, 1), op=ReduceOp.MAX)

    return Call(comm, "barrier").start(body, async_op)
