"""Collectives in shared memory: inside a node no message need be sent at all.

In `all_reduce`, every rank reduces its own 1/N of the tensor, reading its peers' parts
directly, and all read the result; `reduce_scatter_single` and `all_gather_single` are
its two halves. A tensor that lies anywhere goes through a *staging* buffer that all
ranks can see; one that was made by `empty` lies in shared memory already (NCCL calls
that a *registered* buffer), and nothing has to be copied in or out.

This is what NCCL does inside a node, with GPUs that read each other's memory over
NVLink. How it is done here: `arena`, `slices`, `symmetric`, and below them `segment`.
Explained in chapter 03.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.arena import (
    Place,
    arena,
    empty,
    free,
    local,
    peers,
    place_of,
)
from ddp_course.collectives.call import Call, Run
from ddp_course.collectives.communicator import Work, communicator
from ddp_course.collectives.reduction import ReduceOp
from ddp_course.collectives.slices import ONE_SHOT, SLOT, cuts

__all__ = [
    "all_gather_single",
    "all_reduce",
    "empty",
    "free",
    "peers",
    "reduce_scatter_single",
    "volumes",
]


def all_reduce(
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine all ranks' `tensor` (on the CPU, any shape, in place), on one machine.

    Without staging if it lies in memory made by `empty`, at the same place on all
    ranks. See `common.all_reduce_by` for arguments and errors; ranks that are not on
    one node cannot do it. Chapter 03.
    """
    comm = communicator(group)
    call = comm.call("shared_memory.all_reduce")
    call.tensor("tensor", tensor)
    call.reduction(op, tensor)
    local(call, tensor)
    place = place_of(call, tensor)

    def body(run: Run) -> None:
        if comm.size == 1:
            run.agree()
        elif place is None:
            if "arena" not in comm.kept:
                run.agree()
            arena(comm).staging.all_reduce(tensor, run.op, run.agree)
        else:
            place[2].all_reduce(tensor, run.op, run.agree)
        if run.meters:
            size, item, registered = comm.size, tensor.element_size(), place is not None
            _count(run, volumes(tensor.numel(), item, size, comm.rank, registered))

    return call.start(body, async_op, agreed_by_body=True)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine all ranks' `input`; the r-th rank gets the r-th part, in `output`.

    As `shards.reduce_scatter_single`, on one machine: without staging if `input` lies
    in memory made by `empty`, at the same place on all ranks. `output` may be this
    rank's own part of `input`, whose other parts stay as they are. Raises
    CollectiveError. Chapters 03 and 07.
    """
    comm = communicator(group)
    call = comm.call("shared_memory.reduce_scatter_single")
    call.tensor("output", output)
    call.times("input", input, comm.size, "output", output)
    call.reduction(op, output)
    place = place_of(call, input)
    return _shards(call, place, output, input, async_op)


def all_gather_single(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Put the inputs of all ranks one after the other into `output` of every rank.

    As `shards.all_gather_single`, on one machine: without staging if `input` lies in
    memory made by `empty`, at the same place on all ranks; or if `output` does, and
    `input` is this rank's own part of it. Raises CollectiveError. Chapters 03 and 08.
    """
    comm = communicator(group)
    call = comm.call("shared_memory.all_gather_single")
    call.tensor("input", input)
    call.times("output", output, comm.size, "input", input)
    place = None
    if not call.problem:
        own = output.view(comm.size, -1)[comm.rank] if output.numel() else input
        whole = own.data_ptr() == input.data_ptr()
        place = place_of(call, output if whole else input)
    return _shards(call, place, output, input, async_op)


def _shards(
    call: Call, place: Place | None, output: Tensor, input: Tensor, async_op: bool
) -> Work | None:
    """Do a collective in which every rank reads one shard of each other's memory."""
    comm, gathers = call.comm, "all_gather" in call.name
    for tensor in (output, input):
        local(call, tensor)

    def body(run: Run) -> None:
        if comm.size == 1:
            run.agree()
            if output.data_ptr() != input.data_ptr():
                output.view(-1).copy_(input.view(-1))
            return
        if place is None and "arena" not in comm.kept:
            run.agree()
        memory = arena(comm).staging if place is None else place[2]
        if gathers:
            memory.all_gather(output.view(-1), input.view(-1), run.agree)
        else:
            memory.reduce_scatter(output.view(-1), input.view(-1), run.op, run.agree)
        _count(run, [(input if gathers else output).nbytes] * comm.size)

    return call.start(body, async_op, agreed_by_body=True)


def _count(run: Run, per_peer: list[int]) -> None:
    """Tell the byte meters what went from rank to rank, though not as a message.

    Sent is what others read of this rank's memory, and what it writes into theirs.
    """
    me, ranks = run.comm.rank, run.comm.ranks
    for meter in run.meters:
        for peer, rank in enumerate(ranks):
            if peer != me:
                meter.count_sent(rank, per_peer[peer])
                meter.count_received(rank, per_peer[peer])


def volumes(
    numel: int, itemsize: int, size: int, rank: int, registered: bool = False
) -> list[int]:
    """Return how many bytes an all-reduce moves from `rank` to each of `size` ranks.

    As many come back. A small tensor is read whole by everyone. Otherwise rank p reads
    slice p of this rank's numbers, and slice `rank` of the result goes to p: together
    2 (N - 1) / N S to all peers, as around a ring. Chapter 03.
    """
    nbytes = numel * itemsize
    if nbytes <= ONE_SHOT and not registered:
        return [nbytes] * size
    slab = numel if registered else SLOT // itemsize
    slices = [0] * size
    for first in range(0, numel, max(slab, 1)):
        edges = cuts(min(slab, numel - first), size, itemsize)
        for p in range(size):
            slices[p] += (edges[p + 1] - edges[p]) * itemsize
    return [slices[p] + slices[rank] for p in range(size)]
