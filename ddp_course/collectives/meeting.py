"""Meetings: how the ranks of a process group compare their calls before they send.

By default they compare through the store of the rendezvous, which takes milliseconds.
The ranks of one machine do it in microseconds, at a barrier in shared memory. This file
does not import that barrier: each new meeting asks the functions in `BARRIER_FINDERS`,
and `collectives/__init__.py`, which Python runs before any module of this folder, adds
`one_machine.find_barrier` to them. A meeting lives as long as its process group.
Explained in chapter 02.
"""

import ast
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ddp_course.launch.deadlock import (
    CollectiveError,
    Watch,
    by_text,
    checked_group,
    default_store,
    exchange_by_store,
)

Group = dist.ProcessGroup | None  # None: all ranks

PROBLEM = "!"  # the first letter of a note that reports a problem
SHOWN = " \0"  # separates the words, which must be equal, from the value shown
WHOLE = 4000  # bytes; a barrier may truncate longer notes


class MeetingBarrier(Protocol):
    """A place where the ranks of a meeting compare a text, faster than by the store."""

    def meet(self, text: str) -> list[str] | None:
        """Wait for all ranks; return None if all texts are equal, else all texts.

        Texts of more than `WHOLE` bytes may be truncated.
        """


class Meeting:
    """This rank's view of a process group whose ranks compare their calls.

    Attributes:
        rank, size: this rank's number in the group, and the group's size.
        ranks: the members' global ranks.
        exchange: `exchange(value)` all-gathers a value (numbers, strings, tuples of
            these) through the store: slow, for setup.
        machines: the machine of each rank.
        barrier: a faster place to compare; None: the ranks compare through the store.
        kept: objects that algorithms keep for the group's next call, by name.
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
        self.machines: list[tuple[str, ...]] = self.exchange(machine())
        self.barrier: MeetingBarrier | None = None
        for find in BARRIER_FINDERS:
            if self.size > 1 and self.barrier is None:
                self.barrier = find(self)
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
        """Wait for the group's collective that is under way; then `agree`."""
        if self.busy and threading.get_ident() != self.thread:
            futures.wait([self.under_way])
        return self.agree(words, problem, show)

    def agree(
        self, words: str, problem: str | None = None, show: Any = None
    ) -> list[Any]:
        """Compare the ranks' calls before any of them sends anything.

        On one machine this takes microseconds, and is a barrier. Raises
        CollectiveError, with the same text on every rank, if a rank has a problem or
        the words differ. Chapter 02.

        Args:
            words: this rank's call, which must be equal on all ranks.
            problem: why this rank cannot make the call, or None.
            show: a value (numbers, strings, lists of these) to gather from all ranks.

        Returns:
            the values that the ranks show, in rank order.
        """
        self.watch.doing = words
        own = make_note(words, problem, show)
        notes: list[str] | None = [own]
        if self.barrier is not None:
            notes = self.barrier.meet(own)
            if notes and any(len(note.encode()) > WHOLE for note in notes):
                notes = self.exchange(own)
        elif self.size > 1:
            notes = self.exchange(own)
        if notes is None:  # all are equal
            if not problem:
                return [show] * self.size
            notes = [own] * self.size
        return read_notes(notes, self.ranks)

    def _busy_elsewhere(self) -> bool:
        return any(other.busy for other in _MEETINGS.values() if other is not self)


# All ranks of a new meeting call these functions with it, in this order; each returns a
# barrier on all ranks, or None on all.
BARRIER_FINDERS: list[Callable[[Meeting], MeetingBarrier | None]] = []


def machine(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return an identifier that is equal on the ranks of one node only.

    It consists of the machine's name, the kernel's boot id, and the node's number,
    since `spawn` emulates several nodes on one machine.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return socket.gethostname(), boot, environ.get("GROUP_RANK", "")


_MEETINGS: dict[dist.ProcessGroup, Meeting] = {}


def meeting(group: Group = None) -> Meeting:
    """Return the meeting of `group` (None: all ranks); created by the first call.

    That call is a collective: all members must make it. Raises ValueError or TypeError
    if this rank is not a member of `group`.
    """
    group = checked_group(group)
    if group not in _MEETINGS:
        for known in list(_MEETINGS):  # forget groups that were destroyed
            if _is_destroyed(known):
                del _MEETINGS[known]
        _MEETINGS[group] = Meeting(group)
    return _MEETINGS[group]


def quick_exchange(group: Group = None) -> Callable[[str], list[str]]:
    """Return a function that all-gathers a text within a group.

    On one machine this takes microseconds, in shared memory.
    """
    return lambda text: meeting(group).agree_now("flags", show=text)


def _is_destroyed(group: dist.ProcessGroup) -> bool:
    try:
        return not dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # PyTorch no longer knows the group
        return True


# ---- notes: every rank shows one, and compares those of all --------------------------


def make_note(words: str, problem: str | None, show: Any) -> str:
    """Return a rank's note: its words and the value to show, or its problem."""
    if problem:
        return PROBLEM + problem
    return words if show is None else f"{words}{SHOWN}{show!r}"


def read_notes(notes: Sequence[str], ranks: Sequence[int]) -> list[Any]:
    """Return the values that the ranks show, if their words are equal.

    Raises CollectiveError if a rank has a problem, or if the words differ.
    """
    problems = [n[1:] if n[:1] == PROBLEM else "" for n in notes]
    if any(problems):
        raise CollectiveError(f"{by_text(problems, ranks)}. Nothing was sent.")
    words, shown = zip(*(n.partition(SHOWN)[::2] for n in notes), strict=True)
    if len(set(words)) > 1:
        difference = f"the ranks make different calls. {by_text(words, ranks)}"
        raise CollectiveError(f"{difference}. Nothing was sent.")
    return [ast.literal_eval(value) if value else None for value in shown]
