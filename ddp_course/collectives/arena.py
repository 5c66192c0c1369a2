"""Memory that the ranks of a group share: `empty` makes tensors in it.

What makes a tensor there differ from another one: `shared_memory`'s collectives need
not copy it to where the others can see it. Explained in chapter 03.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.agreement import AgreementInMemory
from ddp_course.collectives.call import Call, Run
from ddp_course.collectives.communicator import Communicator, communicator
from ddp_course.collectives.mapping import PAGE, round_up
from ddp_course.collectives.meeting import Meeting
from ddp_course.collectives.segment import Segment, share
from ddp_course.collectives.slices import Staging
from ddp_course.collectives.symmetric import SymmetricMemory

Place = tuple[int, int, SymmetricMemory]  # its number, the byte in it, the memory


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

    def find(self, tensor: Tensor) -> Place | None:
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
    local(call)

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
    place = place_of(call, tensor)
    if place is None and comm.size > 1:
        call.refuse("the tensor does not lie in this group's shared memory")

    def body(run: Run) -> None:
        if place is not None:
            memories = arena(comm).memories
            memories[:] = [m for m in memories if m is not place[2]]

    call.start(body)


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
    found = comm.kept["arena"].find(tensor) if "arena" in comm.kept else None
    if found is None or not tensor.is_contiguous():
        raise ValueError(
            f"the tensor of shape {[*tensor.shape]} does not lie, contiguous, in "
            f"memory that this group shares (shared_memory.empty)"
        )
    return found[2].peers(tensor)


def local(call: Call, tensor: object = None) -> None:
    """Check that the group's ranks, and the tensor, are where memory can be shared."""
    comm = call.comm
    if len(comm.nodes) > 1:
        nodes = [[comm.ranks[index] for index in node] for node in comm.nodes]
        call.refuse(f"memory is shared inside a node; the group has ranks on {nodes}")
    elif comm.size > 1 and not isinstance(comm.agree, AgreementInMemory):
        call.refuse("this machine lets these ranks share no memory (memfd, /proc)")
    if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
        call.refuse(f"tensor is on {tensor.device}; it must be on the CPU")


def place_of(call: Call, tensor: object) -> Place | None:
    """Find a tensor in shared memory; all ranks' must be at the same place."""
    if "arena" not in call.comm.kept or call.problem or not isinstance(tensor, Tensor):
        return None
    place = call.comm.kept["arena"].find(tensor) if tensor.numel() else None
    if place is not None:
        call.words.append(f"in shared memory {place[0]} at byte {place[1]}")
    return place
