"""What the ranks of a process group keep between calls, and how they agree.

Who is in the group, a barrier in shared memory at which they agree before each call, a
thread in which collectives can be under way (`async_op=True`), and memory to receive
into. It lives as long as the process group. Explained in chapter 02.
"""

import ast
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.allocator import container, machine
from ddp_course.collectives.memory_barrier import Barrier
from ddp_course.launch.deadlock import (
    CollectiveError,
    Watch,
    by_text,
    checked_group,
    default_store,
    exchange_by_store,
    ranks_in_words,
)

Group = dist.ProcessGroup | None  # None: all ranks

PROBLEM = "!"  # the first letter of a note that tells of a problem
SHOWN = " \0"  # between what must be equal and what is only shown


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
    """This rank's part of a process group: who is in it, and what is kept for it.

    `rank` and `size` count within the group; `ranks` are its members' ranks in the job.
    `exchange(value)` shows a value (of numbers, strings, and tuples of such) to all
    ranks, and returns everyone's: slow, for setting things up. `barrier` is where the
    ranks of one machine meet; None where they can have no memory in common.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future | None = None
        self._of_thread: int | None = None
        self.watch = Watch(
            default_store(), self.ranks, dist.get_rank(), self._busy_elsewhere
        )
        self.exchange = exchange_by_store(group.group_name, self.watch)
        self.barrier: Barrier | None = None
        where = self.exchange((container(), machine(), os.getpid()))  # of each rank
        containers, self.machines, self._processes = zip(*where, strict=True)
        if self.size > 1 and None not in containers and len(set(containers)) == 1:
            with contextlib.suppress(OSError):  # on all ranks, or on none
                self.barrier = Barrier(
                    self.rank, self.size, self.exchange, watch=self._follow
                )
        self.kept: dict[str, Any] = {}  # what an algorithm wants to find again
        self._memory: dict[torch.device, Tensor] = {}

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks of the group can have memory in common, as GPUs cannot."""
        return self.barrier is not None and dist.get_backend(self.group) != "strict"

    @cached_property
    def nodes(self) -> list[list[int]]:
        """The group's ranks (numbered in the group), node by node."""
        nodes: dict[tuple, list[int]] = {}
        for index, node in enumerate(self.machines):
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

    def agree_now(
        self, words: str, problem: str | None = None, show: Any = None
    ) -> list[Any]:
        """Compare what all ranks are about to do, before any of them sends anything.

        `words` say what, and must be equal; a rank that cannot do it gives the
        `problem`. Returns what every rank shows beside that (numbers, strings, and
        lists of such), in order. On one machine it takes microseconds, and is a
        barrier. What is under way in this group comes first. Raises CollectiveError,
        with the same text on every rank. Chapter 02.
        """
        shown: list[Any] = []
        self.perform(lambda: shown.extend(self.agree(words, problem, show)), False)
        return shown

    def agree(
        self, words: str, problem: str | None = None, show: Any = None
    ) -> list[Any]:
        """Agree as `agree_now` does, but whatever is under way: for what is itself."""
        self.watch.doing = words
        own = note(words, problem, show)
        notes: list[str] | None = [own]
        if self.barrier is not None:
            notes = self.barrier.meet(own)
        elif self.size > 1:
            notes = self.exchange(own)
        if notes is None:  # all are equal
            if not problem:
                return [show] * self.size
            notes = [own] * self.size
        return read(notes, self.ranks)

    def perform(self, job: Callable[[], None], async_op: bool) -> Work | None:
        """Do `job` now, or in this group's thread, in the order of the calls.

        What a job in the thread performs is part of it, and done at once.
        """
        busy = self._last is not None and not self._last.done()
        in_thread = threading.get_ident() == self._of_thread
        if in_thread or (not async_op and not busy):
            job()
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "collectives", self._thread_begins)
        self._last = self._thread.submit(in_this_stream(job))
        work = Work(self._last)
        if async_op:
            return work
        work.wait()
        return None

    def _thread_begins(self) -> None:
        self._of_thread = threading.get_ident()

    def _follow(self, late: list[int] | None) -> None:
        """See, while the barrier waits, whether those who are late can come."""
        if late is None:
            self.watch.over()
            return
        self.watch([self.ranks[index] for index in late])
        gone = [index for index in late if has_ended(self._processes[index])]
        if gone and self.watch.is_long():
            names = ranks_in_words([self.ranks[index] for index in gone])
            raise RuntimeError(f"{names} of this group: the process has ended")

    def _busy_elsewhere(self) -> bool:
        others = [c for c in _KEPT.values() if c is not self and c._last is not None]
        return any(not c._last.done() for c in others)


def has_ended(process: int) -> bool:
    """Tell whether a process of this machine is no more, or waits to be buried."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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


_KEPT: dict[dist.ProcessGroup, Communicator] = {}


def communicator(group: Group = None) -> Communicator:
    """Return what this rank keeps for `group` (None: all ranks).

    The first call for a group is a collective: its members must all make it. Raises
    ValueError, TypeError if `group` is none that this rank is in.
    """
    group = checked_group(group)
    if group not in _KEPT:
        for known in list(_KEPT):  # some may have been destroyed meanwhile
            if _is_destroyed(known):
                old = _KEPT.pop(known)
                if old._thread is not None:
                    old._thread.shutdown(wait=False)
        _KEPT[group] = Communicator(group)
    return _KEPT[group]


def quick_exchange(group: Group = None) -> Callable[[str], list[str]]:
    """Return a function that shows a text to all ranks of a group, and returns theirs.

    On one machine it takes microseconds, in shared memory.
    """
    return lambda text: communicator(group).agree_now("flags", show=text)


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    try:
        return not dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # PyTorch knows the group no longer
        return True


# ---- do all mean the same? Every rank shows a note, and judges those of all ----------


def note(words: str, problem: str | None, show: Any) -> str:
    """Return what a rank shows the others: its words and more, or its problem."""
    if problem:
        return PROBLEM + problem
    return words if show is None else f"{words}{SHOWN}{show!r}"


def read(notes: Sequence[str], ranks: Sequence[int]) -> list[Any]:
    """Return what every rank shows beside its words, if these are equal.

    Raises CollectiveError if a rank has a problem, or if the words differ.
    """
    problems = [note[1:] if note[:1] == PROBLEM else "" for note in notes]
    if any(problems):
        raise CollectiveError(f"{by_text(problems, ranks)}. Nothing was sent.")
    words, shown = zip(*(n.partition(SHOWN)[::2] for n in notes), strict=True)
    if len(set(words)) > 1:
        told = f"the ranks do not call the same. {by_text(words, ranks)}"
        raise CollectiveError(f"{told}. Nothing was sent.")
    return [ast.literal_eval(value) if value else None for value in shown]
