"""The runtime that waits less: messages are posted ahead; and what else it can do.

A program says which messages are posted together (`program`), and that order is kept.
Over gloo the rest is a matter of time:

    post     a receive before it is its turn, AHEAD actions before the one that needs
             it: then the message comes while this rank computes
    send     and go on; the memory is kept until the message has left
    receive  wait for what has not arrived when it is needed

NCCL carries out the messages of two ranks one after the other, in the order in which
they are given. There a receive, too, is posted at its place in the program, whose order
is the same on both ranks. And there are

    I  backward, of which the weights' gradients are put off (`split_backward`)
    W  those that I has put off

stages that keep nothing but their input (`recompute`), and events on a clock. Chapters
10 and 11.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_course.collectives.port import Handle
from ddp_course.measure import active_logs
from ddp_course.mechanisms.recompute import recompute
from ddp_course.mechanisms.weight_gradients import Task
from ddp_course.pipeline.clocks import COMPUTE, VirtualClock, WallClock
from ddp_course.pipeline.program import Group, Instruction, Program
from ddp_course.pipeline.runtime import Runtime
from ddp_course.pipeline.schedule import Action

AHEAD = 2  # actions
UNDER_WAY = 2  # messages to one rank whose memory is not free yet
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward to the inputs",
    "W": "gradients of the weights",
}


class PipelineError(RuntimeError):
    """An action failed on this rank: says which one. What it raised is the cause."""


class OverlappedRuntime(Runtime):
    """One step of a `PipelineParallel`, or of its evaluation."""

    def __init__(self, pipeline: Any, program: Program, x: Tensor, y: Tensor | None):
        super().__init__(pipeline, program.schedule, x, y)
        self.groups = program.ranks[self.port.rank]
        self.horizons = horizons(self.groups, AHEAD)
        self.in_order = pipeline.device.type == "cuda" or self.port.strict
        self.posted = -1  # up to this group
        self.arriving: dict[Action, tuple[list[Tensor], list[Handle]]] = {}
        self.under_way: dict[int, deque[tuple[list[Tensor], list[Handle]]]] = {}
        self.put_off: dict[tuple[int, int], list[Task]] = {}  # from I to W
        self.clock = VirtualClock() if pipeline.virtual_time else WallClock()
        self.logs = active_logs()

    def run(self) -> None:
        """Carry out this rank's row. Raises PipelineError from what goes wrong."""
        for number, group in enumerate(self.groups):
            self.post(number)
            if group[0].kind == "compute":
                action = group[0].action
                made = self.compute(action, self.receive(action))
                if made is not None:
                    self.made[action] = made
            else:
                for step in group:
                    if step.kind == "send":
                        self.send_to(step.peer, step.action)
                    elif self.in_order:
                        self.expect(step)
        for messages in self.under_way.values():
            while messages:
                _wait(messages.popleft()[1])

    # ---- messages --------------------------------------------------------------------

    def post(self, number: int) -> None:
        """Group `number` begins: post what may be received from now on."""
        while not self.in_order and self.posted < self.horizons[number]:
            self.posted += 1
            for step in self.groups[self.posted]:
                if step.kind == "recv":
                    self.expect(step)

    def expect(self, step: Instruction) -> None:
        """Begin to receive what a step is about."""
        room = [self.room_for(step.action)]
        if self.clock.virtual:
            room.append(torch.empty(1, dtype=torch.float64))
        handles = [self.port.receive(part, step.peer) for part in room]
        self.arriving[step.action] = room, handles

    def receive(self, action: Action) -> Tensor | None:
        """Return what `action` needs, and wait for it if it has not arrived."""
        source = self.schedule.source(action)
        if source in self.arriving:
            start = self.clock.now()
            (self.made[source], *sent_at), handles = self.arriving.pop(source)
            _wait(handles)
            if sent_at:
                self.clock.heard(sent_at[0].item())
            self.record("wait", start, "wait", source)
        return super().receive(action)

    def send_to(self, peer: int, action: Action) -> None:
        """Begin to send what `action` has made, when there is room for one more."""
        start, tensors = self.clock.now(), [self.made.pop(action).contiguous()]
        if self.clock.virtual:
            tensors.append(torch.tensor([start], dtype=torch.float64))
        under_way = self.under_way.setdefault(peer, deque())
        if len(under_way) == UNDER_WAY:
            _wait(under_way.popleft()[1])
        under_way.append((tensors, [self.port.send(part, peer) for part in tensors]))
        self.record("send", start, "send", action, tensors[0].nbytes)

    # ---- actions ---------------------------------------------------------------------

    def compute(self, action: Action, given: Tensor | None) -> Tensor | None:
        """Carry out an action, and note when. Raises PipelineError if it fails."""
        start = self.clock.begin()
        try:
            made = self.halves(action, given)
        except Exception as error:
            raise PipelineError(
                f"{action} failed ({NAMES[action.op]} of stage {action.stage}, "
                f"microbatch {action.microbatch}): {type(error).__name__}: {error}"
            ) from error
        self.clock.end()
        self.record(action.op, start, COMPUTE, action)
        return made

    def halves(self, action: Action, given: Tensor | None) -> Tensor | None:
        """F and B are whole; I leaves for W what nobody waits for."""
        key = action.stage, action.microbatch
        if action.op == "I":
            with self.pipeline.weight_grads.collect() as self.put_off[key]:
                return self.backward(*key, given)
        if action.op == "W":
            tasks = self.put_off.pop(key)
            while tasks:  # one after the other lets go of what it needed
                tasks.pop()()
            return None
        return super().compute(action, given)

    def call(self, stage: int, *arguments: Tensor) -> Tensor:
        """Compute a stage; perhaps so that backward computes it again."""
        if self.pipeline.recompute and torch.is_grad_enabled():
            return recompute(self.stages[stage], *arguments)
        return super().call(stage, *arguments)

    def record(
        self, op: str, start: float, lane: str, action: Action, nbytes: int = 0
    ) -> None:
        """Write an event that ends now into the open logs."""
        end, which = self.clock.now(), {"step": self.pipeline.steps}
        which |= {"stage": action.stage, "microbatch": action.microbatch}
        for log in self.logs:
            log.add(op, start, end, nbytes, lane=lane, **which)


def horizons(groups: Sequence[Group], ahead: int) -> list[int]:
    """Return for each group up to which one receives are posted when it begins. Pure.

    That is the group of the action that is `ahead` actions after the next one.
    """
    actions = [n for n, group in enumerate(groups) if group[0].kind == "compute"]
    found = []
    for number in range(len(groups)):
        last = bisect_left(actions, number) + ahead
        found.append(actions[last] if last < len(actions) else len(groups) - 1)
    return found


def _wait(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.wait()
