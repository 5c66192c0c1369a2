"""A recorder of pipelines: writes each rank's actions into the open event logs.

    PipelineParallel(model, "1f1b", 8, recorder=PipelineRecorder())

Ranks that share cores slow each other down: `virtual_time` has another recorder.
Chapter 10.
"""

import time
from typing import Any

from torch import Tensor

from ddp_course.measure.blocks import active_logs
from ddp_course.pipeline.runtime import Runtime
from ddp_course.pipeline.schedule import Action

COMPUTE = "compute"  # the lane of F, B, I and W


class WallClock:
    """A clock of `time.perf_counter()`, common to all ranks of a machine."""

    begin = end = now = staticmethod(time.perf_counter)


class PipelineRecorder:
    """A part that writes an event for each action, each send and each wait."""

    def __init__(self) -> None:
        self.clock: Any = WallClock()
        self.step, self.start = 0, 0.0  # start time of the current action

    def before_run(self, runtime: Runtime) -> None:
        """Find the logs that are open now."""
        self.logs = active_logs()

    def after_run(self, runtime: Runtime) -> None:
        """Count the step."""
        self.step += 1

    def before_compute(self, runtime: Runtime, action: Action) -> None:
        """Record the start of an action."""
        self.start = self.clock.begin()

    def after_compute(self, runtime: Runtime, action: Action) -> None:
        """Write an event of the action's op."""
        self.clock.end()
        self._write(action.op, COMPUTE, action)

    def before_wait(self, runtime: Runtime, action: Action) -> None:
        """Record the start of a wait or a send."""
        self.start = self.clock.now()

    def after_wait(self, runtime: Runtime, action: Action) -> None:
        """Write an event of the wait."""
        self._write("wait", "wait", action)

    before_send = before_wait

    def after_send(self, runtime: Runtime, action: Action, tensor: Tensor) -> None:
        """Write an event of the send."""
        self._write("send", "send", action, tensor.nbytes)

    def _write(self, op: str, lane: str, action: Action, nbytes: int = 0) -> None:
        where = {"stage": action.stage, "microbatch": action.microbatch}
        end = self.clock.now()
        for log in self.logs:
            log.add(op, self.start, end, nbytes, lane=lane, step=self.step, **where)
