"""A part of `PipelineParallel` that posts receives early, so that ranks wait less.

A program defines the order of messages, and which are posted together (`program`). This
part keeps that order. Over gloo it

    posts     each receive AHEAD actions before the action that needs it, so that the
              message arrives while this rank computes
    sends     without waiting, if fewer than UNDER_WAY messages to the same rank are
              unfinished; it keeps the memory until the message has left
    receives  by waiting until the message has arrived

NCCL runs the messages between two ranks in the order of the calls. So with NCCL a
receive, too, is posted at its place in the program, which is the same on both ranks.
Chapters 10 and 11.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ddp_course.collectives.endpoint import Handle
from ddp_course.mechanisms.parts import announce
from ddp_course.pipeline.program import (
    Instruction,
    InstructionGroup,
    Program,
    add_messages,
)
from ddp_course.pipeline.runtime import Runtime
from ddp_course.pipeline.schedule import Action

AHEAD = 2  # how many actions early a receive is posted
UNDER_WAY = 2  # the most unfinished sends to one rank


class PostedAhead:
    """A part that replaces a runtime's messages by those of a program, posted early."""

    def __init__(self) -> None:
        self.programs: dict[int, Program] = {}  # id of a schedule -> its program

    def before_run(self, runtime: Runtime) -> None:
        """Replace the runtime's messages."""
        schedule = runtime.schedule
        if id(schedule) not in self.programs:
            self.programs[id(schedule)] = add_messages(schedule)
        program = self.programs[id(schedule)]
        runtime.messages = MessagesAhead(runtime, program)

    def before_action(self, runtime: Runtime, action: Action) -> None:
        """Post the messages that come before an action in the program."""
        runtime.messages.go_on()


class MessagesAhead:
    """The messages of one run, in the order of a program."""

    def __init__(self, runtime: Runtime, program: Program) -> None:
        self.runtime = runtime
        self.groups = program.ranks[runtime.endpoint.rank]
        self.horizons = horizons(self.groups, AHEAD)
        self.in_order = runtime.device.type == "cuda" or runtime.endpoint.strict
        self.next, self.posted = 0, -1  # indices: next group to run, last one posted
        self.arriving: dict[Action, tuple[Tensor, Handle]] = {}
        self.under_way: dict[int, deque[tuple[Tensor, Handle]]] = {}

    def go_on(self) -> None:
        """Execute the groups of messages up to the next action, or to the end."""
        while self.next < len(self.groups):
            group = self.groups[self.next]
            self._post()
            self.next += 1
            if group[0].kind == "compute":
                return
            for step in group:
                if step.kind == "send":
                    self._start_send(step)
                elif self.in_order:
                    self._start_receive(step)

    def receive(self, source: Action) -> None:
        """Wait for the result of `source`, and store it in the runtime's results."""
        runtime = self.runtime
        announce(runtime.parts, "before_wait", runtime, source)
        runtime.results[source], handle = self.arriving.pop(source)
        handle.wait()
        announce(runtime.parts, "after_wait", runtime, source)

    def send(self, action: Action) -> None:
        """Skip the send: `go_on` sends the result at its place in the program."""

    def finish(self) -> None:
        """Execute the remaining groups, and wait until all messages have left."""
        self.go_on()
        for messages in self.under_way.values():
            while messages:
                messages.popleft()[1].wait()

    def _post(self) -> None:
        """Post the receives that `horizons` allows before the next group."""
        while not self.in_order and self.posted < self.horizons[self.next]:
            self.posted += 1
            for step in self.groups[self.posted]:
                if step.kind == "recv":
                    self._start_receive(step)

    def _start_receive(self, step: Instruction) -> None:
        tensor = self.runtime.allocate(step.action)
        handle = self.runtime.endpoint.receive(tensor, step.peer)
        self.arriving[step.action] = tensor, handle

    def _start_send(self, step: Instruction) -> None:
        """Start to send a result; wait first if too many sends are under way."""
        runtime, tensor = self.runtime, self.runtime.results.pop(step.action)
        announce(runtime.parts, "before_send", runtime, step.action)
        under_way = self.under_way.setdefault(step.peer, deque())
        if len(under_way) == UNDER_WAY:
            under_way.popleft()[1].wait()
        under_way.append((tensor, runtime.endpoint.send(tensor, step.peer)))
        announce(runtime.parts, "after_send", runtime, step.action, tensor)


def horizons(groups: Sequence[InstructionGroup], ahead: int) -> list[int]:
    """Return, for each group, the last group whose receives are posted before it runs.

    Receives are posted up to the `ahead`-th action after the group's next action. Pure.
    """
    actions = [n for n, group in enumerate(groups) if group[0].kind == "compute"]
    lasts = []
    for number in range(len(groups)):
        last = bisect_left(actions, number) + ahead
        lasts.append(actions[last] if last < len(actions) else len(groups) - 1)
    return lasts
