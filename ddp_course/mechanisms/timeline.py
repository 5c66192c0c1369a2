"""Record a backward pass in the open event logs (`measure.EventLog`).

    lane "compute"        op "backward": computing, up to the last gradient of a bucket
    lane "launch"         op "launch": handing a bucket over
    lane "communication"  a bucket is under way
    lane "wait"           op "wait": backward has ended, the buckets have not

so that `measure.overlap(events, "compute", "communication")` is the communication that
was hidden. The course's own collectives write their event themselves; for PyTorch's it
lasts from the call to the moment at which gloo's thread reports its end. On GPUs the
host only queues what is to be computed and sent: there, "compute" and "communication"
are between CUDA events (`GpuClock`), which tell when a stream came to them. Chapter 05.
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
    """Moments of the streams of this rank's GPU; known when it has come to them."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self.cuda, self.device = cuda, cuda.current_device()
        cuda.synchronize()  # so that host and GPU begin at the same moment
        self.start, self.first = time.perf_counter(), self.now()

    def now(self) -> torch.cuda.Event:
        """Let the current stream note when it has done what it was given so far."""
        with self.cuda.device(self.device):  # another thread's may be another
            event = self.cuda.Event(enable_timing=True)
            event.record()
        return event

    def seconds(self, event: torch.cuda.Event) -> float:
        """Wait until it has; return when that was, as `time.perf_counter()` counts."""
        event.synchronize()
        return self.start + self.first.elapsed_time(event) / 1000  # milliseconds


class Timeline:
    """The events of one backward pass, which begins when this is made.

    If nobody keeps a log, nothing is recorded. With a `clock`, moments are those of a
    GPU, and are recorded when all has ended.
    """

    def __init__(self, logs: Sequence[EventLog], clock: GpuClock | None = None) -> None:
        self.logs, self.clock = logs, clock
        self.now = clock.now if clock else time.perf_counter
        self.since = self.now()
        self._ends: list[torch.futures.Future] = []
        self._noted: list[tuple[str, Any, Any, dict[str, Any]]] = []

    @classmethod
    def begin(cls) -> Self:
        """Return a time-line of what happens from now on, for those who keep a log."""
        logs = active_logs()
        return cls(logs, GpuClock() if logs and torch.cuda.is_initialized() else None)

    def add(self, op: str, start: float, lane: str, **detail: Any) -> None:
        """Add an event that ends now."""
        now = time.perf_counter()
        for log in self.logs:
            log.add(op, start, now, lane=lane, **detail)

    def computed(self, **detail: Any) -> None:
        """Backward has computed since the last time this was said."""
        self._note("backward", self.since, lane="compute", **detail)
        self.since = self.now()

    def sent(self, work: Any, nbytes: int, start: Any, **detail: Any) -> None:
        """A collective was called at `start`, a `now()`; note when it ends."""
        detail = {"nbytes": nbytes, "lane": "communication", **detail}
        if not self.logs or not hasattr(work, "get_future"):
            return  # the course's collectives add their event themselves
        future = work.get_future()
        ends = future.then(lambda _: self._note("all_reduce", start, **detail))
        self._ends.append(ends)

    def _note(self, op: str, start: Any, **detail: Any) -> None:
        """Something that began at `start` ends now; on a GPU, it will be known when."""
        if self.clock is None:
            self.add(op, start, **detail)
        else:
            self._noted.append((op, start, self.now(), detail))

    def all_ended(self) -> None:
        """Return when the end of everything that was sent has been noted."""
        for end in self._ends:
            end.wait()
        for op, start, end, detail in self._noted:
            when = self.clock.seconds(start), self.clock.seconds(end)
            for log in self.logs:
                log.add(op, *when, **detail)


@contextmanager
def span(timeline: Timeline | None, op: str, **detail: Any) -> Iterator[None]:
    """Add an event that lasts as long as this block, if anybody keeps a log."""
    start = time.perf_counter()
    yield
    if timeline is not None:
        timeline.add(op, start, op, **detail)


class RecordBackward:
    """A part of an engine that records its backward passes, if anybody keeps a log."""

    def __init__(self) -> None:
        self.timeline = Timeline(())  # nothing is recorded outside of backward

    def before_backward(self, engine: Any) -> None:
        """Begin a time-line."""
        self.timeline = Timeline.begin()

    def bucket_full(self, engine: Any, bucket: Any) -> None:
        """Record the computing that has filled a bucket."""
        self.timeline.computed(bucket=bucket.index)

    def before_launch(self, engine: Any, bucket: Any) -> None:
        """Note when a bucket is launched."""
        self.start, self.host_start = self.timeline.now(), time.perf_counter()

    def after_launch(self, engine: Any, bucket: Any) -> None:
        """Record the launch, and the communication when it ends."""
        timeline, index = self.timeline, bucket.index
        timeline.add("launch", self.host_start, "launch", bucket=index)
        timeline.sent(bucket.work, bucket.flat.nbytes, self.start, bucket=index)
        timeline.since = timeline.now()  # launching is not computing

    def backward_ended(self, engine: Any) -> None:
        """Record the computing after the last full bucket."""
        self.timeline.computed()

    def before_wait(self, engine: Any, bucket: Any) -> None:
        """Note when the host begins to wait, for one bucket or for all (None)."""
        if bucket is not None:  # in the middle of backward
            self.timeline.computed()
        self.host_start = time.perf_counter()

    def after_wait(self, engine: Any, bucket: Any) -> None:
        """Record the waiting."""
        detail = {} if bucket is None else {"bucket": bucket.index}
        self.timeline.add("wait", self.host_start, "wait", **detail)
        self.timeline.since = self.timeline.now()
        if bucket is None:
            self.timeline.all_ended()
            self.timeline = Timeline(())
