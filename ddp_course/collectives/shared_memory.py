"""Collectives in shared memory: inside a node no message need be sent at all.

In `all_reduce`, every rank reduces its own 1/N of the tensor, reading its peers' parts
directly, and all read the result; `reduce_scatter_single` and `all_gather_single` are
its two halves. A tensor that lies anywhere goes through a *staging* buffer that all
ranks can see; one that was made by `empty` lies in shared memory already (NCCL calls
that a *registered* buffer), and nothing has to be copied in or out.

NCCL does something like it inside a node for small messages, or where GPUs have
*symmetric* memory; otherwise rings or NVLink's own sums. How it is done here: `staging`
and, below it, `memory_barrier` and `allocator`. Explained in chapter 03.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import methodcaller

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.call import Collective
from ddp_course.collectives.communicator import Communicator, Group, Work, communicator
from ddp_course.collectives.reduction import Op, ReduceOp
from ddp_course.collectives.staging import ONE_SHOT, Staging, SymmetricMemory, cuts

# ---- tensors that lie in shared memory -----------------------------------------------


def empty(
    *shape: int, dtype: torch.dtype = torch.float32, group: Group = None
) -> Tensor:
    """Return an uninitialised tensor in shared memory; called by all ranks together.

    It can be used like any other; an `all_reduce` of it, or of a contiguous part of it,
    needs no staging. All ranks give the same shape and type. It takes memory until
    `free` or the end of the group. Raises CollectiveError; OSError if there is too
    little memory. Chapter 03.
    """
    call = Collective(group, "shared_memory.empty", shape=list(shape), dtype=dtype)
    made: list[Tensor] = []
    if any(not isinstance(length, int) or length < 0 for length in shape):
        call.refuse(f"shape is {shape}; it must be whole numbers, 0 or more")
    _check_shared(call)

    def body() -> None:
        if call.size == 1:
            made.append(torch.empty(shape, dtype=dtype))
            return
        nbytes, comm = math.prod(shape) * dtype.itemsize, call.comm
        memory = SymmetricMemory(comm.barrier, nbytes, comm.exchange)
        _memories(comm).append(memory)
        made.append(memory.own.view(dtype).view(shape))

    call.start(body)
    return made[0]


def free(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Let go of the memory of `tensor`, made by `empty`; called by all ranks.

    It is given back when the tensor itself is gone, too. Raises CollectiveError.
    """
    call = Collective(group, "shared_memory.free")
    memory = _memory_of(call, tensor)
    if memory is None and call.size > 1:
        call.refuse("the tensor does not lie in this group's shared memory")
    call.start(lambda: _memories(call.comm).remove(memory) if memory else None)


def peers(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return every rank's tensor at the place where `tensor` lies in shared memory.

    Reading or writing them is all there is to communicating; it is up to you that
    nobody writes what another is reading (`barrier`), and nothing is checked or
    metered. The own one is among them. No collective: any rank may ask. Raises
    ValueError if `tensor` does not lie in this group's shared memory.
    """
    comm = communicator(group)
    if comm.size == 1:
        return [tensor]
    for memory in _memories(comm):
        if memory.find(tensor) is not None and tensor.is_contiguous():
            return memory.peers(tensor)
    raise ValueError(
        f"the tensor of shape {[*tensor.shape]} does not lie, contiguous, in "
        f"memory that this group shares (shared_memory.empty)"
    )


def _memories(comm: Communicator) -> list[SymmetricMemory]:
    return comm.kept.setdefault("symmetric memories", [])


def _memory_of(call: Collective, tensor: object) -> SymmetricMemory | None:
    """Find the shared memory in which a tensor lies; on all ranks at the same place."""
    if not call.problem and isinstance(tensor, Tensor) and tensor.numel():
        for number, memory in enumerate(_memories(call.comm)):
            offset = memory.find(tensor)
            if offset is not None:
                call.words.append(f"in shared memory {number} at byte {offset}")
                return memory
    return None


def _check_shared(call: Collective, *tensors: object) -> None:
    """Check that the group's ranks, and the tensors, are where memory can be shared."""
    comm = call.comm
    if len(comm.nodes) > 1:
        nodes = [[comm.ranks[index] for index in node] for node in comm.nodes]
        call.refuse(f"memory is shared inside a node; the group has ranks on {nodes}")
    elif comm.size > 1 and not comm.shares_memory:
        call.refuse("this machine lets these ranks share no memory (memfd, /proc)")
    for tensor in tensors:
        if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
            call.refuse(f"tensor is on {tensor.device}; it must be on the CPU")


# ---- the collectives -----------------------------------------------------------------


def all_reduce(
    tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Work | None:
    """Combine all ranks' `tensor` (on the CPU, any shape, in place), on one machine.

    Without staging if it lies in memory made by `empty`, at the same place on all
    ranks. See `call.all_reduce_by` for arguments and errors; ranks that are not on
    one node cannot do it. Chapter 03.
    """
    call = Collective(group, "shared_memory.all_reduce")
    call.tensor("tensor", tensor)
    call.reduction(op, tensor)
    memory = _memory_of(call, tensor)

    def moved() -> list[int]:
        how = tensor.element_size(), call.size, call.rank, memory is not None
        return volumes(tensor.numel(), *how)

    work = methodcaller("all_reduce", tensor, call.op, call.agree)
    return _start(call, tensor, tensor, memory, work, moved, async_op)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Combine all ranks' `input`; the r-th rank gets the r-th part, in `output`.

    As `collectives.reduce_scatter_single`, on one machine: without staging if `input`
    lies in memory made by `empty`, at the same place on all ranks. `output` may be this
    rank's own part of `input`, whose other parts stay as they are. Raises
    CollectiveError. Chapters 03 and 07.
    """
    call = Collective(group, "shared_memory.reduce_scatter_single")
    call.tensor("output", output)
    call.times("input", input, "output", output)
    call.reduction(op, output)
    memory = _memory_of(call, input)

    def moved() -> list[int]:
        return [output.nbytes] * call.size

    work = methodcaller("reduce_scatter", output, input, call.op, call.agree)
    return _start(call, output, input, memory, work, moved, async_op)


def all_gather_single(
    output: Tensor, input: Tensor, group: Group = None, async_op: bool = False
) -> Work | None:
    """Put the inputs of all ranks one after the other into `output` of every rank.

    As `collectives.all_gather_single`, on one machine: without staging if `input` lies
    in memory made by `empty`, at the same place on all ranks; or if `output` does, and
    `input` is this rank's own part of it. Raises CollectiveError. Chapters 03 and 08.
    """
    call = Collective(group, "shared_memory.all_gather_single")
    call.tensor("input", input)
    call.times("output", output, "input", input)
    memory = None
    if not call.problem:
        own = output.view(-1).tensor_split(call.size)[call.rank]
        in_place = own.data_ptr() == input.data_ptr()
        memory = _memory_of(call, output if in_place else input)

    def moved() -> list[int]:
        return [input.nbytes] * call.size

    work = methodcaller("all_gather", output, input, call.agree)
    return _start(call, output, input, memory, work, moved, async_op)


def _start(
    call: Collective,
    output: Tensor,
    input: Tensor,
    memory: SymmetricMemory | None,
    work: Callable[[Staging | SymmetricMemory], None],
    moved: Callable[[], Sequence[int]],
    async_op: bool,
) -> Work | None:
    """Do `work` with `memory`; if that is None, with the group's staging buffer.

    That is made at the first call, on which its ranks must agree before. `moved()` are
    the bytes that others read of this rank's memory, or that it writes into theirs, by
    peer; as many come back. The meters count them, though they are no messages.
    """
    _check_shared(call, output, input)
    kept = call.comm.kept

    def body() -> None:
        if call.size == 1:
            call.agree()
            if output.data_ptr() != input.data_ptr():
                output.view(-1).copy_(input.view(-1))
            return
        if memory is None and "staging" not in kept:
            call.agree()
            kept["staging"] = Staging(call.comm.barrier, call.comm.exchange)
        work(kept["staging"] if memory is None else memory)
        if call.meters:
            peers = zip(call.comm.ranks, moved(), strict=True)
            for rank, nbytes in (p for k, p in enumerate(peers) if k != call.rank):
                for meter in call.meters:
                    meter.count_sent(rank, nbytes)
                    meter.count_received(rank, nbytes)

    return call.start(body, async_op, agreed_by_body=True)


def volumes(
    numel: int, itemsize: int, size: int, rank: int, registered: bool = False
) -> list[int]:
    """Return how many bytes an all-reduce moves from `rank` to each of `size` ranks.

    As many come back. A small tensor is read whole by everyone. Otherwise rank p reads
    slice p of this rank's numbers, and slice `rank` of the result goes to p: together
    2 (N - 1) / N S to all peers, as around a ring; slices begin at cache lines, so that
    some are a little longer than others. Chapter 03.
    """
    nbytes = numel * itemsize
    if nbytes <= ONE_SHOT and not registered:
        return [nbytes] * size
    slices = [(b - a) * itemsize for a, b in pairwise(cuts(numel, size, itemsize))]
    return [slices[p] + slices[rank] for p in range(size)]
