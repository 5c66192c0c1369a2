"""All-reduce in shared memory: inside a node, ranks need no messages.

Every rank reduces its own 1/N of the tensor, reading its peers' parts directly, and all
read the result. An ordinary tensor is copied through a *staging* buffer that all ranks
can read; a tensor created by `empty` is in shared memory already (NCCL calls that a
*registered* buffer), and need not be copied.

NCCL does this where GPUs have *symmetric* memory (small messages go whole to everybody,
and every GPU adds them up); otherwise it uses rings, trees or sums that NVLink's
switches compute. The implementation is in `staging` and, below it, `memory_barrier` and
`allocator`. Explained in chapter 03.
"""

import math
import os
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.call import Collective
from ddp_course.collectives.communicator import Communicator, Group, Work
from ddp_course.collectives.reduction import Op, ReduceOp
from ddp_course.collectives.staging import ONE_SHOT, Staging, SymmetricMemory, cuts

# ---- tensors in shared memory --------------------------------------------------------


def empty(
    *shape: int, dtype: torch.dtype = torch.float32, group: Group = None
) -> Tensor:
    """Return an uninitialised tensor in shared memory; all ranks call it together.

    An `all_reduce` of the tensor, or of a contiguous part of it, needs no staging. All
    ranks pass the same shape and type. The memory is kept until `free` or the end of
    the group. Raises CollectiveError; OSError if there is too little memory. Chapter
    03.
    """
    call = Collective(group, "shared_memory.empty", shape=list(shape), dtype=dtype)
    tensors: list[Tensor] = []
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if any(not isinstance(length, int) or length < 0 for length in shape):
        call.refuse(f"shape is {shape}; it must be whole numbers, 0 or more")
    elif not isinstance(dtype, torch.dtype):
        call.refuse(f"dtype is {dtype!r}; it must be a type, such as torch.float32")
    elif (nbytes := math.prod(shape) * dtype.itemsize) > most:
        text = f"shape is {shape}, which takes {nbytes:,} bytes; this machine has"
        call.refuse(f"{text} {most:,} bytes of memory")
    _check_shared(call)

    def body() -> None:
        if call.size == 1:
            tensors.append(torch.empty(shape, dtype=dtype))
            return
        nbytes, meeting = math.prod(shape) * dtype.itemsize, call.comm.meeting
        memory = SymmetricMemory(meeting.barrier, nbytes, meeting.exchange)
        _memories(call.comm).append(memory)
        tensors.append(memory.own.view(dtype).view(shape))

    call.start(body)
    return tensors[0]


def free(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Free the memory of `tensor`, created by `empty`; all ranks call it together.

    The memory is freed when no tensor uses it any more. Raises CollectiveError.
    """
    call = Collective(group, "shared_memory.free")
    memory = _memory_of(call, tensor)
    if memory is None and call.size > 1:
        call.refuse("the tensor is not in this group's shared memory")
    call.start(lambda: _memories(call.comm).remove(memory) if memory else None)


def _memories(comm: Communicator) -> list[SymmetricMemory]:
    return comm.kept.setdefault("symmetric memories", [])


def _memory_of(call: Collective, tensor: object) -> SymmetricMemory | None:
    """Return the shared memory that holds `tensor` at the same place on all ranks."""
    if not call.problem and isinstance(tensor, Tensor) and tensor.numel():
        for number, memory in enumerate(_memories(call.comm)):
            offset = memory.find(tensor)
            if offset is not None:
                call.words.append(f"in shared memory {number} at byte {offset}")
                return memory
    return None


def _check_shared(call: Collective, *tensors: object) -> None:
    """Check that the ranks can share memory and the tensors are on the CPU."""
    comm = call.comm
    if len(comm.nodes) > 1:
        nodes = [[comm.ranks[index] for index in node] for node in comm.nodes]
        call.refuse(f"memory is shared inside a node; the group has ranks on {nodes}")
    elif comm.size > 1 and not comm.shares_memory:
        call.refuse("these ranks cannot share memory, which needs memfd and /proc")
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
            call.refuse(f"tensor is on {tensor.device}; it must be on the CPU")


# ---- the collective ------------------------------------------------------------------


def all_reduce(
    tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Reduce all ranks' `tensor` (on the CPU, any shape, in place), on one node.

    A tensor in memory created by `empty`, at the same place on all ranks, is reduced
    without staging. See `call.all_reduce_by` for arguments and errors. Chapter 03.
    """
    call = Collective(group, "shared_memory.all_reduce")
    call.tensor("tensor", tensor)
    call.reduction(op, tensor)
    memory = _memory_of(call, tensor)
    _check_shared(call, tensor)

    def body() -> None:
        kept = call.comm.kept
        if call.size == 1:
            call.agree()
            return
        if memory is None and "staging" not in kept:  # at the first call
            call.agree()
            meeting = call.comm.meeting
            kept["staging"] = Staging(meeting.barrier, meeting.exchange)
        way = kept["staging"] if memory is None else memory
        way.all_reduce(tensor, call.op, call.agree)
        # No message is sent; the meters count the bytes that other ranks read.
        if call.meters:
            how = tensor.element_size(), call.size, call.rank, memory is not None
            moved = volumes(tensor.numel(), *how)
            pairs = [*zip(call.comm.ranks, moved, strict=True)]
            del pairs[call.rank]
            for rank, nbytes in pairs:
                for meter in call.meters:
                    meter.count_sent(rank, nbytes)
                    meter.count_received(rank, nbytes)

    return call.start(body, async_op, agreed_by_body=True)


def volumes(
    numel: int, itemsize: int, size: int, rank: int, registered: bool = False
) -> list[int]:
    """Return the bytes that an all-reduce moves from `rank` to each of `size` ranks.

    As many bytes come back. Every rank reads the whole of a small tensor. Otherwise
    rank p reads slice p of this rank's numbers, and slice `rank` of the result:
    together 2 (N - 1) / N S to all peers, as around a ring. Slices begin at cache
    lines, so some are a little longer than others. Chapter 03.
    """
    nbytes = numel * itemsize
    if nbytes <= ONE_SHOT and not registered:
        return [nbytes] * size
    slices = [(b - a) * itemsize for a, b in pairwise(cuts(numel, size, itemsize))]
    return [slices[p] + slices[rank] for p in range(size)]
