"""Two clocks for a pipeline, and how much of its time was idle.

On the wall clock, ranks that share cores slow each other down. The virtual one asks
what would be if each had cores of its own: computing takes the time that this rank's
thread was on a core, waiting and messages take none, and every message says when it was
sent, so that a receiver that is ahead moves on to that time (Lamport 1978, "Time,
Clocks, and the Ordering of Events"). Chapter 10.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from ddp_course.measure import Event

COMPUTE = "compute"  # the lane of F, B, I and W


class WallClock:
    """Seconds of `time.perf_counter()`, the same for all ranks of a machine."""

    virtual = False

    def begin(self) -> float:
        """Return the time at which computing begins."""
        return time.perf_counter()

    def end(self) -> float:
        """Return the time at which it has ended."""
        return time.perf_counter()

    now = end


class VirtualClock:
    """Seconds since the step began, if every rank had cores of its own."""

    virtual = True

    def __init__(self) -> None:
        self.time = 0.0
        self._since = 0.0  # seconds of this thread

    def begin(self) -> float:
        """Return the time at which computing begins."""
        self._since = time.thread_time()
        return self.time

    def end(self) -> float:
        """Return the time at which it has ended: later by what it took of a core."""
        self.time += time.thread_time() - self._since
        return self.time

    def now(self) -> float:
        """Return the time."""
        return self.time

    def heard(self, sent_at: float) -> None:
        """A message has arrived that was sent at this time: it is not earlier."""
        self.time = max(self.time, sent_at)


def bubble(events: Iterable[Event]) -> float:
    """Return the idle share of all ranks' time, from their events in one or more steps.

    A step lasts from the first start to the last end of F, B, I and W on any rank; idle
    is what a rank does not spend on them, be it waiting for messages or handing them
    over. As `simulate` defines it. Raises ValueError if there are no such events.
    """
    steps: dict[int, list[Event]] = {}
    for event in events:
        if event.lane == COMPUTE:
            steps.setdefault(event.detail["step"], []).append(event)
    if not steps:
        raise ValueError(
            f"there are no events of the lane {COMPUTE!r}: was a log open?"
        )
    ranks = {event.rank for step in steps.values() for event in step}
    busy = sum(event.seconds for step in steps.values() for event in step)
    spans = [
        max(event.end for event in step) - min(event.start for event in step)
        for step in steps.values()
    ]
    return 1 - busy / (len(ranks) * sum(spans))
