"""Where the ranks of a process group compare their calls, before any of them sends.

The ranks of one machine meet at a barrier in shared memory (`memory_barrier`), which
takes microseconds; others meet at the store through which they were launched. A meeting
lives as long as its process group. Explained in chapter 02.
"""

import ast
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

import psutil
import torch.distributed as dist

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


class Meeting:
    """This rank's place among the ranks of a process group.

    Attributes:
        rank, size: within the group.
        ranks: the members' ranks in the job.
        exchange: `exchange(value)` shows a value (of numbers, strings, and tuples of
            such) to all ranks, and returns everyone's: slow, for setting things up.
        barrier: where the ranks of one machine meet; None where they can have no memory
            in common.
        machines: of each rank.
        kept: what an algorithm wants to find again at the group's next call.
        under_way: the newest collective that was started in a thread of this group.
        thread: the identifier of that thread.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.rank, self.size = dist.get_rank(group), len(self.ranks)
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
        self.kept: dict[str, Any] = {}
        self.under_way: futures.Future | None = None
        self.thread: int | None = None

    @property
    def busy(self) -> bool:
        """Whether a collective is under way in the group's thread."""
        return self.under_way is not None and not self.under_way.done()

    def agree_now(
        self, words: str, problem: str | None = None, show: Any = None
    ) -> list[Any]:
        """Wait for what is under way in this group; then `agree`."""
        if self.busy and threading.get_ident() != self.thread:
            futures.wait([self.under_way])
        return self.agree(words, problem, show)

    def agree(
        self, words: str, problem: str | None = None, show: Any = None
    ) -> list[Any]:
        """Compare what all ranks are about to do, before any of them sends anything.

        On one machine it takes microseconds, and is a barrier. Raises CollectiveError,
        with the same text on every rank. Chapter 02.

        Args:
            words: what this rank is about to do; must be equal on all ranks.
            problem: why this rank cannot do it, if so.
            show: a value (numbers, strings, and lists of such) to show to all ranks.

        Returns:
            what every rank shows, in order.
        """
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

    def _follow(self, late: list[int] | None) -> None:
        """See, while the barrier waits, whether those who are late can come."""
        if late is None:
            self.watch.end_wait()
            return
        self.watch([self.ranks[index] for index in late])
        gone = [index for index in late if has_ended(self._processes[index])]
        if gone and self.watch.is_long():
            names = ranks_in_words([self.ranks[index] for index in gone])
            raise RuntimeError(f"{names} of this group: the process has ended")

    def _busy_elsewhere(self) -> bool:
        return any(other.busy for other in _MEETINGS.values() if other is not self)


def has_ended(process: int) -> bool:
    """Tell whether a process of this machine is no more, or waits to be buried."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


_MEETINGS: dict[dist.ProcessGroup, Meeting] = {}


def meeting(group: Group = None) -> Meeting:
    """Return where the ranks of `group` (None: all ranks) meet.

    The first call for a group is a collective: its members must all make it. Raises
    ValueError, TypeError if `group` is none that this rank is in.
    """
    group = checked_group(group)
    if group not in _MEETINGS:
        for known in list(_MEETINGS):  # some may have been destroyed meanwhile
            if _is_destroyed(known):
                del _MEETINGS[known]
        _MEETINGS[group] = Meeting(group)
    return _MEETINGS[group]


def quick_exchange(group: Group = None) -> Callable[[str], list[str]]:
    """Return a function that shows a text to all ranks of a group, and returns theirs.

    On one machine it takes microseconds, in shared memory.
    """
    return lambda text: meeting(group).agree_now("flags", show=text)


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
