"""What a backward pass writes into the open event logs (`measure.EventLog`).

    lane "compute"        op "backward": computing, up to the last gradient of a bucket
    lane "launch"         op "launch": handing a bucket over
    lane "communication"  a bucket is under way
    lane "wait"           op "wait": backward has ended, the buckets have not

so that `measure.overlap(events, "compute", "communication")` is the communication that
was hidden. The course's own collectives write their event themselves; for PyTorch's on
the CPU it lasts from the call to the moment at which gloo's thread reports its end. (On
GPUs that moment says nothing, since NCCL's work is only queued by then: there, take
`torch.profiler`.) Chapter 05.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ddp_course.collectives import Work
from ddp_course.measure import EventLog, active_logs


class Timeline:
    """The events of one backward pass, which begins when this is made.

    If nobody keeps a log, nothing is recorded.
    """

    def __init__(self, logs: tuple[EventLog, ...]) -> None:
        self.logs = logs
        self.since = time.perf_counter()
        self._ends: list[torch.futures.Future] = []

    @classmethod
    def begin(cls) -> Timeline:
        """Return a time-line of what happens from now on, for those who keep a log."""
        return cls(active_logs())

    def add(self, op: str, start: float, lane: str, **detail: Any) -> None:
        """Add an event that ends now."""
        now = time.perf_counter()
        for log in self.logs:
            log.add(op, start, now, lane=lane, **detail)

    def computed(self, **detail: Any) -> None:
        """Backward has computed since the last time this was said."""
        self.add("backward", self.since, "compute", **detail)
        self.since = time.perf_counter()

    def launch(self, send: Callable[[Any], Any], bucket: Any) -> Any:
        """Return what `send(bucket)` returns; note when that was, and when it ends."""
        start, index = time.perf_counter(), bucket.index
        with span(self, "launch", bucket=index):
            work = send(bucket)
        self.sent(work, bucket.flat.nbytes, start, bucket=index)
        self.since = time.perf_counter()  # launching is no computing
        return work

    def sent(self, work: Any, nbytes: int, start: float, **detail: Any) -> None:
        """A collective was called at `start`; note when it ends."""
        detail = {"nbytes": nbytes, "lane": "communication", **detail}
        if not self.logs or work is None or isinstance(work, Work):
            return  # our own add their event themselves
        future = work.get_future()
        ends = future.then(lambda _: self.add("all_reduce", start, **detail))
        self._ends.append(ends)

    def all_ended(self) -> None:
        """Return when the end of everything that was sent has been noted."""
        for end in self._ends:
            end.wait()


@contextmanager
def _span(timeline: Timeline, op: str, **detail: Any) -> Iterator[None]:
    start = time.perf_counter()
    yield
    timeline.add(op, start, op, **detail)


def span(timeline: Timeline | None, op: str, **detail: Any):
    """Return a context manager that adds an event, if anybody keeps a log."""
    keeps = timeline is not None and timeline.logs
    return _span(timeline, op, **detail) if keeps else nullcontext()
