"""Timelines: the events of ranks, and the time in which they overlap.

    with EventLog() as log:
        with log.span("compute"):
            loss.backward()
    return log.events

Ranks record and return events; figures and tests read them. All times are seconds of
`time.perf_counter()`, which on Linux is CLOCK_MONOTONIC: it counts from the machine's
start and is the same clock in all processes of one machine, so the events of its ranks
share one timeline. Explained in chapters 02 and 05.
"""

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch.distributed as dist

from ddp_course.measure.blocks import LOGS, MeasuredBlock


@dataclass(frozen=True)
class Event:
    """An operation of rank `rank` from `start` to `end`, in seconds.

    `lane` is the line on which it is drawn, such as "compute" or "communication", by
    default its `op`. `nbytes` are the bytes that it sent, `detail` has further values
    by name. Raises ValueError if `end` is before `start`.
    """

    rank: int
    op: str
    start: float
    end: float
    nbytes: int = 0
    lane: str = ""
    detail: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.end >= self.start:
            raise ValueError(f"{self.op} starts at {self.start} and ends at {self.end}")
        if not self.lane:
            object.__setattr__(self, "lane", self.op)

    @property
    def seconds(self) -> float:
        """The duration, in seconds."""
        return self.end - self.start


class EventLog(MeasuredBlock):
    """A log of this rank's events; a context manager like `ByteMeter`.

    The collectives of this course add an event to every log that is open when they are
    called. `rank` is by default the calling process's rank. Any thread may add events.
    """

    opened: ClassVar = LOGS

    def __init__(self, rank: int | None = None) -> None:
        super().__init__()
        self.rank = _rank_here() if rank is None else rank
        self._events: list[Event] = []

    def add(
        self,
        op: str,
        start: float,
        end: float,
        nbytes: int = 0,
        *,
        lane: str = "",
        **detail: Any,
    ) -> None:
        """Add an `Event` with times of `time.perf_counter()`."""
        event = Event(self.rank, op, start, end, nbytes, lane, detail)
        with self._lock:
            self._events.append(event)

    @contextmanager
    def span(
        self, op: str, nbytes: int = 0, *, lane: str = "", **detail: Any
    ) -> Iterator[None]:
        """Add an event that lasts as long as the `with` block, even if that raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(op, start, time.perf_counter(), nbytes, lane=lane, **detail)

    @property
    def events(self) -> list[Event]:
        """The events so far, sorted by their start (a new list)."""
        with self._lock:
            return sorted(self._events, key=lambda event: (event.start, event.end))


def _rank_here() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


# ---- durations and overlap ---------------------------------------------------------


def busy(events: Iterable[Event], what: str | None = None) -> float:
    """Return the seconds in which at least one event runs: each second counts once.

    `what` is an op or a lane; None: all events. The seconds of several ranks are added.
    """
    events = list(events)
    return sum(
        end - start
        for rank in {event.rank for event in events}
        for start, end in _union(events, what, rank)
    )


def overlap(events: Iterable[Event], a: str, b: str) -> float:
    """Return the seconds in which events `a` and events `b` of one rank both run.

    `a` and `b` are ops or lanes. A moment counts once, however many events run in it.
    The seconds of several ranks are added; events of different ranks do not overlap.
    Chapter 05.
    """
    events = list(events)
    return sum(
        max(0, min(end, other_end) - max(start, other_start))
        for rank in {event.rank for event in events}
        for start, end in _union(events, a, rank)
        for other_start, other_end in _union(events, b, rank)
    )


def _union(
    events: list[Event], what: str | None, rank: int
) -> list[tuple[float, float]]:
    """Return the time covered by some of a rank's events, as disjoint intervals."""
    covered: list[tuple[float, float]] = []
    for start, end in sorted(
        (event.start, event.end)
        for event in events
        if event.rank == rank and what in (None, event.op, event.lane)
    ):
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(end, covered[-1][1]))
        else:
            covered.append((start, end))
    return covered
