"""What the ranks of a process group keep for their collectives: a thread, and memory.

Collectives can be under way in the thread (`async_op=True`), and receive into the
memory. Where the ranks meet before each call, see `meeting`. A communicator lives as
long as the process group. Explained in chapter 02.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.meeting import Group, Meeting, meeting


class Work:
    """A collective that is under way, as `async_op=True` returns it."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def wait(self) -> bool:
        """Return when the collective is done; raise what it raised."""
        self._future.result()
        return True

    def is_completed(self) -> bool:
        """Tell whether it is done."""
        return self._future.done()


class Communicator:
    """This rank's part of a process group.

    Attributes:
        meeting: where its ranks compare their calls.
        rank, size: within the group.
        ranks: the members' ranks in the job.
        kept: what an algorithm wants to find again at the group's next call.
    """

    def __init__(self, its: Meeting) -> None:
        self.meeting, self.group, self.kept = its, its.group, its.kept
        self.rank, self.size, self.ranks = its.rank, its.size, its.ranks
        self._thread: ThreadPoolExecutor | None = None
        self._memory: dict[torch.device, Tensor] = {}

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the group can have memory in common, as GPUs cannot."""
        strict = dist.get_backend(self.group) == "strict"
        return self.meeting.barrier is not None and not strict

    @cached_property
    def nodes(self) -> list[list[int]]:
        """The group's ranks (numbered in the group), node by node."""
        nodes: dict[tuple, list[int]] = {}
        for index, node in enumerate(self.meeting.machines):
            nodes.setdefault(node, []).append(index)
        return list(nodes.values())

    def scratch(self, numel: int, like: Tensor) -> Tensor:
        """Return memory for `numel` elements, the same again at the next call."""
        nbytes = numel * like.element_size()
        memory = self._memory.get(like.device)
        if memory is None or memory.numel() < nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
            self._memory[like.device] = memory
        return memory[:nbytes].view(like.dtype)

    def perform(self, job: Callable[[], None], async_op: bool) -> Work | None:
        """Do `job` now, or in this group's thread, in the order of the calls.

        What a job in the thread performs is part of it, and done at once.
        """
        in_thread = threading.get_ident() == self.meeting.thread
        if in_thread or not (async_op or self.meeting.busy):
            job()
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "collectives", self._thread_begins)
        future = self._thread.submit(in_this_stream(job))
        self.meeting.under_way = future
        work = Work(future)
        if async_op:
            return work
        work.wait()
        return None

    def _thread_begins(self) -> None:
        self.meeting.thread = threading.get_ident()


def in_this_stream(job: Callable[[], None]) -> Callable[[], None]:
    """Return `job` for another thread: on this one's GPU, in its stream.

    Every thread begins with the first GPU and its default stream, where nobody waits
    for what this thread's stream still computes.
    """
    if not torch.cuda.is_initialized():
        return job
    stream = torch.cuda.current_stream()

    def there() -> None:
        with torch.cuda.stream(stream):
            job()

    return there


def communicator(group: Group = None) -> Communicator:
    """Return what this rank keeps for `group` (None: all ranks).

    The first call for a group is a collective: its members must all make it. Raises
    ValueError, TypeError if `group` is none that this rank is in.
    """
    its = meeting(group)
    if "communicator" not in its.kept:
        its.kept["communicator"] = Communicator(its)
    return its.kept["communicator"]
