"""A part of `PipelineParallel`: what each rank did, and when, for the open event logs.

On the wall clock, ranks that share cores slow each other down. The virtual one asks
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
from ddp_course.measure.blocks import active_logs
from ddp_course.pipeline.runtime import Runtime
from ddp_course.pipeline.schedule import Action

COMPUTE = "compute"  # the lane of F, B, I and W


class WallClock:
    """Seconds of `time.perf_counter()`, the same for all ranks of a machine."""

    virtual = False
    begin = end = now = staticmethod(time.perf_counter)


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


class Recorded:
    """Writes an event for each action, each send and each wait.

    With `virtual_time` the events are on a virtual clock, and each message is followed
    by one of 8 bytes, the time at which it was sent.
    """

    def __init__(self, virtual_time: bool = False) -> None:
        self.virtual_time, self.step = virtual_time, 0
        self.clock = WallClock()
        self.start = 0.0  # of what is under way

    def before_run(self, runtime: Runtime) -> None:
        """Find the logs that are open now."""
        self.logs = active_logs()
        if self.virtual_time:
            self.clock = VirtualClock()
            runtime.port = StampedPort(runtime.port, self.clock)

    def after_run(self, runtime: Runtime) -> None:
        """Count the step."""
        self.step += 1

    def before_compute(self, runtime: Runtime, action: Action) -> None:
        """Begin to compute."""
        self.start = self.clock.begin()

    def after_compute(self, runtime: Runtime, action: Action) -> None:
        """Write an event of the action's op."""
        self.clock.end()
        self._write(action.op, COMPUTE, action)

    def before_wait(self, runtime: Runtime, action: Action) -> None:
        """Begin to wait for a message."""
        self.start = self.clock.now()

    def after_wait(self, runtime: Runtime, action: Action) -> None:
        """Write an event of the wait."""
        self._write("wait", "wait", action)

    before_send = before_wait

    def after_send(self, runtime: Runtime, action: Action, tensor: Tensor) -> None:
        """Write an event of the send."""
        self._write("send", "send", action, tensor.nbytes)

    def _write(self, op: str, lane: str, action: Action, nbytes: int = 0) -> None:
        which = {"stage": action.stage, "microbatch": action.microbatch}
        end = self.clock.now()
        for log in self.logs:
            log.add(op, self.start, end, nbytes, lane=lane, step=self.step, **which)


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
