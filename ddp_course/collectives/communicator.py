"""Communicators: the thread and the memory of a process group's collectives.

Collectives with `async_op=True` run in the thread; messages that will be added arrive
in the memory. `meeting` compares the ranks' calls. A communicator lives as long as its
process group. Explained in chapter 02.
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
        """Wait until the collective is done; raise its error, if any."""
        self._future.result()
        return True

    def is_completed(self) -> bool:
        """Return whether the collective is done."""
        return self._future.done()


class Communicator:
    """This rank's part of a process group.

    Attributes:
        meeting: compares the ranks' calls.
        rank, size: this rank's number in the group, and the group's size.
        ranks: the members' global ranks.
        kept: objects that algorithms keep for the group's next call, by name.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting, self.group, self.kept = meeting, meeting.group, meeting.kept
        self.rank, self.size, self.ranks = meeting.rank, meeting.size, meeting.ranks
        self._thread: ThreadPoolExecutor | None = None
        self._memory: dict[torch.device, Tensor] = {}

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the group can share memory (on the CPU)."""
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
        """Return a flat tensor of `numel` elements, typed as `like`; calls reuse it."""
        nbytes = numel * like.element_size()
        memory = self._memory.get(like.device)
        if memory is None or memory.numel() < nbytes:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
            self._memory[like.device] = memory
        return memory[:nbytes].view(like.dtype)

    def perform(self, job: Callable[[], None], async_op: bool) -> Work | None:
        """Run `job` now, or in this group's thread, in the order of the calls.

        If a job in the thread calls this method, the inner job runs at once.
        """
        in_thread = threading.get_ident() == self.meeting.thread
        if in_thread or not (async_op or self.meeting.busy):
            job()
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "collectives", self._thread_begins)
        if torch.is_inference_mode_enabled():  # it belongs to one thread
            job = torch.inference_mode()(job)
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
    """Return a function that runs `job` in this thread's CUDA stream, in any thread.

    A new thread uses the first GPU and its default stream, which do not wait for the
    kernels of this thread's stream.
    """
    if not torch.cuda.is_initialized():
        return job
    stream = torch.cuda.current_stream()

    def moved() -> None:
        with torch.cuda.stream(stream):
            job()

    return moved


def communicator(group: Group = None) -> Communicator:
    """Return the communicator of `group` (None: all ranks); see `meeting`."""
    found = meeting(group)
    if "communicator" not in found.kept:
        found.kept["communicator"] = Communicator(found)
    return found.kept["communicator"]
