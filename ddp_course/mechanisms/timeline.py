"""What a backward pass writes into the open event logs (`measure.EventLog`).

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

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import torch

from ddp_course.collectives import Work
from ddp_course.measure import EventLog, active_logs


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

    def noted(self, send: Callable[[Any], Any], bucket: Any) -> Any:
        """Return what `send(bucket)` returns; note when that was, and when it ends."""
        start, index = self.now(), bucket.index
        with span(self, "launch", bucket=index):
            work = send(bucket)
        self.sent(work, bucket.flat.nbytes, start, bucket=index)
        self.since = self.now()  # launching is no computing
        return work

    def sent(self, work: Any, nbytes: int, start: Any, **detail: Any) -> None:
        """A collective was called at `start`, a `now()`; note when it ends."""
        detail = {"nbytes": nbytes, "lane": "communication", **detail}
        if not self.logs or work is None or isinstance(work, Work):
            return  # our own add their event themselves
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
