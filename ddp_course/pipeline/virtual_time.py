"""A recorder of pipelines on a virtual clock, for ranks that share cores.

    PipelineParallel(model, "1f1b", 8, recorder=VirtualTime())

On the wall clock, ranks that share cores slow each other down. The virtual clock asks
what would be if each had cores of its own: computing takes the time that this rank's
thread was on a core, waiting and messages take none, and every message says when it was
sent, so that a receiver that is behind moves on to that time (Lamport 1978, "Time,
Clocks, and the Ordering of Events"). Chapter 10.
"""

import time
from typing import Any

import torch
from torch import Tensor

from ddp_course.collectives.port import Handle, Port
from ddp_course.pipeline.recorded import Recorded
from ddp_course.pipeline.runtime import Runtime


class VirtualTime(Recorded):
    """Writes the events of `Recorded` on a virtual clock.

    Each message is followed by one of 8 bytes, the time at which it was sent. Raises
    ValueError on a GPU, whose work this thread does not do itself.
    """

    def before_run(self, runtime: Runtime) -> None:
        """Begin at 0, and send the time with each message."""
        if runtime.device.type != "cpu":
            raise ValueError(
                f"virtual time is for the CPU; the model is on {runtime.device}"
            )
        super().before_run(runtime)
        self.clock = VirtualClock()
        runtime.port = StampedPort(runtime.port, self.clock)


class VirtualClock:
    """Seconds since the step began, if every rank had cores of its own."""

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


class StampedPort:
    """A port whose messages are each followed by the time at which they were sent."""

    def __init__(self, port: Port, clock: VirtualClock) -> None:
        self.port, self.clock = port, clock

    def __getattr__(self, name: str) -> Any:
        """Everything else is the port's."""
        return getattr(self.port, name)

    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Start to send a tensor, and the time."""
        stamp = torch.tensor([self.clock.now()], dtype=torch.float64)
        return _Both(self.port.send(tensor, peer), self.port.send(stamp, peer), stamp)

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        """Start to receive a tensor, and when it was sent; `wait()` sets the clock."""
        stamp = torch.empty(1, dtype=torch.float64)
        first, second = (self.port.receive(each, peer) for each in (tensor, stamp))
        return _Both(first, second, stamp, self.clock)


class _Both:
    def __init__(
        self,
        first: Handle,
        second: Handle,
        stamp: Tensor,
        clock: VirtualClock | None = None,
    ) -> None:
        self.handles, self.stamp, self.clock = (first, second), stamp, clock

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        if self.clock is not None:
            self.clock.heard(self.stamp.item())
