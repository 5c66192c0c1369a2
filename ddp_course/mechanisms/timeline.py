"""Record a backward pass in the open event logs (`measure.EventLog`).

    lane "compute"        op "backward": computing, up to the last gradient of a bucket
    lane "launch"         op "launch": starting the communication of a bucket
    lane "communication"  a bucket is under way
    lane "wait"           op "wait": backward has ended, the buckets have not

Then `measure.overlap(events, "compute", "communication")` is the communication time
that was hidden. The course's own collectives write their events themselves; the event
of a PyTorch collective lasts from the call until gloo's thread reports its end. On GPUs
the host only queues kernels: there, "compute" and "communication" are measured between
CUDA events (`GpuClock`), which record when a stream reaches them. Chapter 05.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from ddp_course.measure.blocks import active_logs

if TYPE_CHECKING:
    from ddp_course.measure import EventLog


class GpuClock:
    """A clock of this rank's GPU: moments are CUDA events of its streams."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.cuda, self.device = cuda, cuda.current_device()
        cuda.synchronize()  # host and GPU begin at the same moment
        self.start, self.first = time.perf_counter(), self.now()

    def now(self) -> torch.cuda.Event:
        """Return an event that the current stream records after its queued work."""
        with self.cuda.device(self.device):  # another thread may have another device
            event = self.cuda.Event(enable_timing=True)
            event.record()
        return event

    def seconds(self, event: torch.cuda.Event) -> float:
        """Wait for `event`; return its time on the clock of `time.perf_counter()`."""
        event.synchronize()
        return self.start + self.first.elapsed_time(event) / 1000  # milliseconds


class Timeline:
    """The events of one backward pass, which begins when the object is constructed.

    Without logs nothing is recorded. With a `clock`, moments are those of a GPU, and
    are written to the logs when the pass has ended.
    """

    def __init__(self, logs: Sequence[EventLog], clock: GpuClock | None = None) -> None:
        self.logs, self.clock = logs, clock
        self.now = clock.now if clock else time.perf_counter
        self.since = self.now()
        self._ends: list[torch.futures.Future] = []
        self._noted: list[tuple[str, Any, Any, dict[str, Any]]] = []

    @classmethod
    def begin(cls) -> Self:
        """Return a timeline for the open logs, beginning now."""
        logs = active_logs()
        return cls(logs, GpuClock() if logs and torch.cuda.is_initialized() else None)

    def add(self, op: str, start: float, lane: str, **detail: Any) -> None:
        """Add an event that ends now."""
        now = time.perf_counter()
        for log in self.logs:
            log.add(op, start, now, lane=lane, **detail)

    def record_compute(self, **detail: Any) -> None:
        """Record that backward has computed since the last call."""
        self._note("backward", self.since, lane="compute", **detail)
        self.since = self.now()

    def record_send(self, work: Any, nbytes: int, start: Any, **detail: Any) -> None:
        """Record a collective from `start`, a result of `now`, until `work` ends."""
        detail = {"nbytes": nbytes, "lane": "communication", **detail}
        if not self.logs or not hasattr(work, "get_future"):
            return  # the course's collectives record their event themselves
        future = work.get_future()
        ends = future.then(lambda _: self._note("all_reduce", start, **detail))
        self._ends.append(ends)

    def _note(self, op: str, start: Any, **detail: Any) -> None:
        """Add an event from `start` until now; on a GPU, its times are read later."""
        if self.clock is None:
            self.add(op, start, **detail)
        else:
            self._noted.append((op, start, self.now(), detail))

    def finish(self) -> None:
        """Wait for the ends of all collectives, and write their events."""
        for end in self._ends:
            end.wait()
        for op, start, end, detail in self._noted:
            when = self.clock.seconds(start), self.clock.seconds(end)
            for log in self.logs:
                log.add(op, *when, **detail)


@contextmanager
def span(timeline: Timeline | None, op: str, **detail: Any) -> Iterator[None]:
    """Add an event that lasts as long as this block, unless `timeline` is None."""
    start = time.perf_counter()
    yield
    if timeline is not None:
        timeline.add(op, start, op, **detail)


class RecordBackward:
    """A part of an engine that records its backward passes in the open logs."""

    def __init__(self) -> None:
        self.timeline = Timeline(())  # nothing is recorded outside of backward

    def before_backward(self, engine: Any) -> None:
        """Begin a timeline."""
        self.timeline = Timeline.begin()

    def bucket_full(self, engine: Any, bucket: Any) -> None:
        """Record the computation that has filled a bucket."""
        self.timeline.record_compute(bucket=bucket.index)

    def before_launch(self, engine: Any, bucket: Any) -> None:
        """Store the time before a bucket is launched."""
        self.start, self.host_start = self.timeline.now(), time.perf_counter()

    def after_launch(self, engine: Any, bucket: Any) -> None:
        """Record the launch, and the communication when it ends."""
        timeline, index = self.timeline, bucket.index
        timeline.add("launch", self.host_start, "launch", bucket=index)
        timeline.record_send(bucket.work, bucket.flat.nbytes, self.start, bucket=index)
        timeline.since = timeline.now()  # do not count launching as computing

    def backward_ended(self, engine: Any) -> None:
        """Record the computation after the last full bucket."""
        self.timeline.record_compute()

    def before_wait(self, engine: Any, bucket: Any) -> None:
        """Store the time when the host begins to wait, for one bucket or all (None)."""
        if bucket is not None:  # in the middle of backward
            self.timeline.record_compute()
        self.host_start = time.perf_counter()

    def after_wait(self, engine: Any, bucket: Any) -> None:
        """Record the wait."""
        detail = {} if bucket is None else {"bucket": bucket.index}
        self.timeline.add("wait", self.host_start, "wait", **detail)
        self.timeline.since = self.timeline.now()
        if bucket is None:
            self.timeline.finish()
            self.timeline = Timeline(())
