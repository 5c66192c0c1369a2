"""All-reduce in shared memory: inside a node no message need be sent at all.

Every rank reduces its own 1/N of the tensor, reading its peers' parts directly, and all
read the result. A tensor that lies anywhere goes through a *staging* buffer that all
ranks can see; one that was made by `empty` lies in shared memory already (NCCL calls
that a *registered* buffer), and nothing has to be copied in or out.

This is what NCCL does inside a node, with GPUs that read each other's memory over
NVLink. How it is done here: `slices` and `symmetric`, and below them `segment`.
Explained in chapter 03.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.agreement import AgreementInMemory
from ddp_course.collectives.call import Call, Run
from ddp_course.collectives.communicator import Communicator, Work, communicator
from ddp_course.collectives.mapping import PAGE, round_up
from ddp_course.collectives.meeting import Meeting
from ddp_course.collectives.reduction import ReduceOp
from ddp_course.collectives.segment import Segment, share
from ddp_course.collectives.slices import ONE_SHOT, SLOT, Staging, cuts
from ddp_course.collectives.symmetric import SymmetricMemory


class Arena:
    """What the ranks of one group share: a place to stage tensors, and tensors."""

    def __init__(self, comm: Communicator) -> None:
        """Make it; called by all ranks of the group. OSError if there is no memory."""
        notes = round_up(Meeting.nbytes(comm.size), PAGE)
        nbytes = notes + Staging.nbytes(comm.size)
        self.segment: Segment = share(nbytes, comm.rank, comm.size, comm.exchange)
        self.staging = Staging(self.segment, notes)
        self.memories: list[SymmetricMemory] = []
        comm.agree.use(Meeting(self.segment))  # from now on they meet here

    def find(self, tensor: Tensor) -> tuple[int, int, SymmetricMemory] | None:
        """Return where a tensor lies in the ranks' shared memories, if it does."""
        for number, memory in enumerate(self.memories):
            offset = memory.find(tensor)
            if offset is not None:
                return number, offset, memory
        return None


def arena(comm: Communicator) -> Arena:
    """Return the arena of a group; the first call is for all its ranks together."""
    if "arena" not in comm.kept:
        comm.kept["arena"] = Arena(comm)
    return comm.kept["arena"]


def empty(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return an uninitialised tensor in shared memory; called by all ranks together.

    It can be used like any other; an `all_reduce` of it, or of a contiguous part of it,
    needs no staging. All ranks give the same shape and type. It takes memory until
    `free` or the end of the group. Raises CollectiveError; OSError if there is too
    little memory. Chapter 03.
    """
    comm = communicator(group)
    call = comm.call("shared_memory.empty", shape=list(shape), dtype=dtype)
    made: list[Tensor] = []
    if any(not isinstance(length, int) or length < 0 for length in shape):
        call.refuse(f"shape is {shape}; it must be whole numbers, 0 or more")
    _local(call)

    def body(run: Run) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        if comm.size == 1:
            made.append(torch.empty(shape, dtype=dtype))
            return
        here = arena(comm)
        memory = SymmetricMemory(here.segment, nbytes, comm.exchange)
        here.memories.append(memory)
        made.append(memory.own.view(dtype).view(shape))

    call.start(body)
    return made[0]


def free(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Let go of the memory of `tensor`, made by `empty`; called by all ranks.

    It is given back when the tensor itself is gone, too. Raises CollectiveError.
    """
    comm = communicator(group)
    call = comm.call("shared_memory.free")
    place = _place(call, tensor)
    if place is None and comm.size > 1:
        call.refuse("the tensor does not lie in this group's shared memory")

    def body(run: Run) -> None:
        if place is not None:
            memories = arena(comm).memories
            memories[:] = [m for m in memories if m is not place[2]]

    call.start(body)


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
    _local(call, tensor)
    place = _place(call, tensor)

    def body(run: Run) -> None:
        if comm.size == 1:
            run.agree()
        elif place is None:
            if "arena" not in comm.kept:
                run.agree()
            arena(comm).staging.all_reduce(tensor, run.op, run.agree)
        else:
            place[2].all_reduce(tensor, run.op, run.agree)
        _count(run, tensor, place is not None)

    return call.start(body, async_op, agreed_by_body=True)


def _local(call: Call, tensor: object = None) -> None:
    """Check that the group's ranks, and the tensor, are where memory can be shared."""
    comm = call.comm
    if len(comm.nodes) > 1:
        nodes = [[comm.ranks[index] for index in node] for node in comm.nodes]
        call.refuse(f"memory is shared inside a node; the group has ranks on {nodes}")
    elif comm.size > 1 and not isinstance(comm.agree, AgreementInMemory):
        call.refuse("this machine lets these ranks share no memory (memfd, /proc)")
    if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
        call.refuse(f"tensor is on {tensor.device}; it must be on the CPU")


def _place(call: Call, tensor: object) -> tuple[int, int, SymmetricMemory] | None:
    """Find a tensor in shared memory; all ranks' must be at the same place."""
    if "arena" not in call.comm.kept or call.problem or not isinstance(tensor, Tensor):
        return None
    place = call.comm.kept["arena"].find(tensor) if tensor.numel() else None
    if place is not None:
        call.words.append(f"in shared memory {place[0]} at byte {place[1]}")
    return place


def _count(run: Run, tensor: Tensor, registered: bool) -> None:
    """Tell the byte meters what went from rank to rank, though not as a message.

    Sent is what others read of this rank's memory, and what it writes into theirs.
    """
    me, ranks = run.comm.rank, run.comm.ranks
    for meter in run.meters:
        per_peer = volumes(
            tensor.numel(), tensor.element_size(), len(ranks), me, registered
        )
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
