"""The runtime: one rank carries out its row of a schedule's program, whatever it is.

    F  take the input, compute, keep input and output, hand the output over
    B  take the output's gradient, go backward, hand the input's gradient over
    I  the same, but the weights' gradients are put off (`split_backward`)
    W  those that I has put off

A stage hands over to the stage after it or before it, as a message or, on the same
rank, just so. What F keeps is dropped by B, or by I, and what I keeps by W: nothing is
kept that the schedule does not ask for. The runtime knows no schedule by name.
Chapter 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_course.measure import EventLog
from ddp_course.mechanisms.recompute import recompute
from ddp_course.pipeline.clocks import COMPUTE, VirtualClock, WallClock
from ddp_course.pipeline.messages import Key, Messages
from ddp_course.pipeline.program import Group
from ddp_course.pipeline.schedule import Action
from ddp_course.pipeline.split_backward import Later, Task
from ddp_course.pipeline.stages import Stage


class PipelineError(RuntimeError):
    """An action failed on this rank: says which one. What it raised is the cause."""


class Record:
    """Writes what a rank does in a step into event logs, if there are any."""

    def __init__(
        self, logs: Sequence[EventLog], clock: WallClock | VirtualClock, step: int
    ) -> None:
        self.logs, self.clock, self.step = logs, clock, step

    def __call__(
        self, op: str, start: float, lane: str, nbytes: int = 0, **detail: Any
    ) -> None:
        """Add an event that ends now."""
        for log in self.logs:
            end = self.clock.now()
            log.add(op, start, end, nbytes, lane=lane, step=self.step, **detail)


class Run:
    """One batch on its way through the pipeline, as far as one rank sees it.

    Args:
        stages: those of this rank, by number.
        num_stages: of all ranks.
        x, y: of each microbatch the model's input, and the targets or None.
        weights: of each microbatch its part of the loss; their sum is 1.
        messages: to and from other ranks.
        later: where the layers leave what I puts off.
        recomputed: keep the stages' inputs alone, and compute again in backward.
        clock, record: what time it is, and who wants to know.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        num_stages: int,
        x: Sequence[Tensor],
        y: Sequence[Tensor | None],
        messages: Messages,
        later: Later,
        recomputed: bool,
        clock: WallClock | VirtualClock,
        record: Callable[..., None],
    ) -> None:
        self.stages, self.last = stages, num_stages - 1
        self.x, self.y, self.messages = x, y, messages
        self.later, self.recomputed = later, recomputed
        self.clock, self.record = clock, record
        self.do = {
            "F": self._forward,
            "B": self._backward,
            "I": self._inputs,
            "W": self._weights,
        }
        rows = sum(map(len, x))
        self.weights = [len(part) / rows for part in x]
        self.made: dict[Key, Tensor] = {}  # and not yet handed over
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # F -> B or I
        self.put_off: dict[tuple[int, int], list[Task]] = {}  # I -> W
        self.losses: dict[int, Tensor] = {}  # of the last stage, weighted
        self.outputs: dict[int, Tensor] = {}  # of the last stage, without targets

    def __call__(self, groups: Sequence[Group]) -> None:
        """Carry out this rank's row. Raises PipelineError from what goes wrong."""
        for number, group in enumerate(groups):
            self.messages.post(number)
            if group[0].kind == "compute":
                self._compute(group[0].action)
            else:
                self.messages.exchange(group, self.made)
        self.messages.settle()

    def _compute(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        taken = self._take(action)
        start = self.clock.begin()
        try:
            self.do[action.op](stage, microbatch, taken)
        except Exception as error:
            raise PipelineError(
                f"{action} failed ({NAMES[action.op]} of stage {stage}, microbatch "
                f"{microbatch}): {type(error).__name__}: {error}"
            ) from error
        self.clock.end()
        self.record(action.op, start, COMPUTE, stage=stage, microbatch=microbatch)

    def _take(self, action: Action) -> Tensor | None:
        """Return what the action needs from the stage before it, or after it."""
        if action.op == "W" or (action.op != "F" and action.stage == self.last):
            return None
        if action.op == "F" and action.stage == 0:
            return self.x[action.microbatch]
        what, neighbour = ("activation", -1) if action.op == "F" else ("gradient", 1)
        key = what, action.stage + neighbour, action.microbatch
        if key in self.made:  # on this rank
            return self.made.pop(key)
        return self.messages.take(key)

    # ---- the four actions ------------------------------------------------------------

    def _forward(self, stage: int, microbatch: int, x: Tensor) -> None:
        y = self.y[microbatch] if stage == self.last else None
        arguments = (x,) if y is None else (x, y)
        module, training = self.stages[stage], torch.is_grad_enabled()
        if stage > 0 and training:
            x.requires_grad_()
        if self.recomputed and training:
            output = recompute(module, *arguments)
        else:
            output = module(*arguments)
        if y is not None:  # a mean over the microbatch's rows
            output = output * self.weights[microbatch]
            self.losses[microbatch] = output.detach()
        elif stage == self.last:
            self.outputs[microbatch] = output
        else:
            self.made["activation", stage, microbatch] = output.detach()
        if training:
            self.kept[stage, microbatch] = x, output

    def _backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> None:
        x, output = self.kept.pop((stage, microbatch))
        if output.requires_grad:
            torch.autograd.backward(output, gradient)
        if stage > 0:
            of_x = torch.zeros_like(x) if x.grad is None else x.grad
            self.made["gradient", stage, microbatch] = of_x

    def _inputs(self, stage: int, microbatch: int, gradient: Tensor | None) -> None:
        with self.later.put_off() as tasks:
            self._backward(stage, microbatch, gradient)
        self.put_off[stage, microbatch] = tasks

    @torch.no_grad()
    def _weights(self, stage: int, microbatch: int, taken: None) -> None:
        tasks = self.put_off.pop((stage, microbatch))
        while tasks:  # one after the other lets go of what it needed
            tasks.pop()()


NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the inputs",
    "W": "gradients of the weights",
}
