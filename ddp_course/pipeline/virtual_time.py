"""A recorder of pipelines on a virtual clock, for ranks that share cores.

    PipelineParallel(model, "1f1b", 8, recorder=VirtualTime())

On the wall clock, ranks that share cores slow each other down. The virtual clock shows
the times that ranks with cores of their own would have. Computing takes the time that
this rank's thread was on a core; waiting and messages take none. Every message carries
the time of its send, and a receiver that is behind sets its clock to that time (Lamport
1978, "Time, Clocks, and the Ordering of Events"). Chapter 10.
"""

import time
from typing import Any

import torch
from torch import Tensor

from ddp_course.collectives.endpoint import Endpoint, Handle
from ddp_course.pipeline.recorded import PipelineRecorder
from ddp_course.pipeline.runtime import Runtime


class VirtualTime(PipelineRecorder):
    """A `PipelineRecorder` with a virtual clock.

    Each message is followed by one of 8 bytes: the time of its send. Raises ValueError
    for a model on a GPU, as the clock counts the time of this thread only.
    """

    def before_run(self, runtime: Runtime) -> None:
        """Start the clock at 0, and send the time with each message."""
        if runtime.device.type != "cpu":
            raise ValueError(
                f"VirtualTime works on the CPU only; the model is on {runtime.device}; "
                "use PipelineRecorder"
            )
        super().before_run(runtime)
        self.clock = VirtualClock()
        runtime.endpoint = StampedEndpoint(runtime.endpoint, self.clock)


class VirtualClock:
    """A clock of seconds since the step began, as if each rank had its own cores."""

    def __init__(self) -> None:
        self.time = 0.0
        self._since = 0.0  # thread time at the last `begin`

    def begin(self) -> float:
        """Start to measure a computation; return the clock's time."""
        self._since = time.thread_time()
        return self.time

    def end(self) -> float:
        """Add the computation's time on a core to the clock; return the new time."""
        self.time += time.thread_time() - self._since
        return self.time

    def now(self) -> float:
        """Return the clock's time."""
        return self.time

    def advance(self, sent_at: float) -> None:
        """Set the clock to the time of a received message, if that is later."""
        self.time = max(self.time, sent_at)


class StampedEndpoint:
    """An endpoint that sends the time after each message."""

    def __init__(self, endpoint: Endpoint, clock: VirtualClock) -> None:
        self.endpoint, self.clock = endpoint, clock

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the wrapped endpoint."""
        return getattr(self.endpoint, name)

    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Start to send a tensor, and the time."""
        stamp = torch.tensor([self.clock.now()], dtype=torch.float64)
        return _StampedHandle(
            self.endpoint.send(tensor, peer), self.endpoint.send(stamp, peer), stamp
        )

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        """Start to receive a tensor, and its time; `wait()` sets the clock."""
        stamp = torch.empty(1, dtype=torch.float64)
        first, second = (self.endpoint.receive(each, peer) for each in (tensor, stamp))
        return _StampedHandle(first, second, stamp, self.clock)


class _StampedHandle:
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
            self.clock.advance(self.stamp.item())
