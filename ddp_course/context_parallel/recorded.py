"""Parts of `Ring` that record its steps, or sleep in proportion to their work.

    lane "compute"          op `op`: one step's blocks, with their (query, key) pairs
    lane "wait"             op "wait": the next keys and values have not arrived
    lane "communication"    op "send": a message is on a slow line (`spawn(links=...)`)

Four ranks on two cores slow each other down. `SleepingSteps` sleeps in proportion to
the pairs, which uses no core. Chapter 16.
"""

import threading
import time
from collections.abc import Sequence

from torch import Tensor

from ddp_course.collectives.endpoint import Handle
from ddp_course.context_parallel.ring import Ring
from ddp_course.measure.blocks import active_logs


class RingRecorder:
    """A part that writes events into the open logs.

    Attributes:
        op: the op of events in the lane "compute", "forward" or "backward".
    """

    def __init__(self) -> None:
        self.op = "forward"
        self.since = 0.0  # time at which the last event ended
        self.sends: list[threading.Event] = []  # set when the send's event is written

    def before_compute(self, ring: Ring, step: int, pairs: int) -> None:
        """Record the start of computing."""
        self.since = time.perf_counter()

    def after_compute(self, ring: Ring, step: int, pairs: int) -> None:
        """Write an event for the computation."""
        self._write(self.op, "compute", step=step, pairs=pairs)

    def arrived(self, ring: Ring, step: int) -> None:
        """Write an event for the wait."""
        self._write("wait", "wait", step=step)

    def passed_on(self, ring: Ring, tensor: Tensor, handles: Sequence[Handle]) -> None:
        """Write an event when a slow line has carried the message."""
        logs, start, nbytes = active_logs(), time.perf_counter(), tensor.nbytes
        written = threading.Event()

        def carried(_: object) -> None:
            for log in logs:
                log.add(
                    "send", start, time.perf_counter(), nbytes, lane="communication"
                )
            written.set()

        for handle in handles:
            if hasattr(handle, "started"):  # the handle of a slow line
                self.sends.append(written)
                handle.started.add_done_callback(carried)

    def finish(self) -> None:
        """Wait for the events of all messages, which the line's thread writes."""
        for written in self.sends:
            written.wait()

    def _write(self, op: str, lane: str, **detail: int) -> None:
        start, self.since = self.since, time.perf_counter()
        for log in active_logs():
            log.add(op, start, self.since, lane=lane, **detail)


class SleepingSteps:
    """A part that sleeps in each step of a ring, in proportion to its work.

    Attributes:
        seconds: time for one pair of query and key, all heads together.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def before_compute(self, ring: Ring, step: int, pairs: int) -> None:
        """Sleep for the time of this step's pairs."""
        time.sleep(self.seconds * pairs)
