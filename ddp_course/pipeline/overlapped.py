"""A part of `PipelineParallel`: messages are posted ahead of time, so ranks wait less.

A program says which messages are posted together (`program`), and that order is kept.
Over gloo the rest is a matter of time:

    post     a receive before it is its turn, AHEAD actions before the one that needs
             it: then the message comes while this rank computes
    send     and go on; the memory is kept until the message has left
    receive  wait for what has not arrived when it is needed

NCCL carries out the messages of two ranks one after the other, in the order in which
they are given. There a receive, too, is posted at its place in the program, whose order
is the same on both ranks. Chapters 10 and 11.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ddp_course.collectives.port import Handle
from ddp_course.mechanisms.parts import announce
from ddp_course.pipeline.program import Group, Instruction, Program, add_messages
from ddp_course.pipeline.runtime import Runtime
from ddp_course.pipeline.schedule import Action

AHEAD = 2  # actions
UNDER_WAY = 2  # messages to one rank whose memory is not free yet


class PostedAhead:
    """Lets a runtime's messages follow a program, with receives posted ahead."""

    def __init__(self) -> None:
        self.programs: dict[int, Program] = {}  # by the id of their schedule

    def before_run(self, runtime: Runtime) -> None:
        """Replace the runtime's messages."""
        schedule = runtime.schedule
        if id(schedule) not in self.programs:
            self.programs[id(schedule)] = add_messages(schedule)
        program = self.programs[id(schedule)]
        runtime.messages = MessagesAhead(runtime, program)

    def before_action(self, runtime: Runtime, action: Action) -> None:
        """Carry out the messages that come before an action."""
        runtime.messages.go_on()


class MessagesAhead:
    """The messages of one run, as a program says."""

    def __init__(self, runtime: Runtime, program: Program) -> None:
        self.runtime = runtime
        self.groups = program.ranks[runtime.port.rank]
        self.horizons = horizons(self.groups, AHEAD)
        self.in_order = runtime.device.type == "cuda" or runtime.port.strict
        self.next, self.posted = 0, -1  # group to carry out; last one posted
        self.arriving: dict[Action, tuple[Tensor, Handle]] = {}
        self.under_way: dict[int, deque[tuple[Tensor, Handle]]] = {}

    def go_on(self) -> None:
        """Carry out the groups of messages up to the next action, or to the end."""
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
        """Wait for the result of `source`, and put it among this rank's results."""
        runtime = self.runtime
        announce(runtime.parts, "before_wait", runtime, source)
        runtime.results[source], handle = self.arriving.pop(source)
        handle.wait()
        announce(runtime.parts, "after_wait", runtime, source)

    def send(self, action: Action) -> None:
        """Do nothing yet: the program says when."""

    def finish(self) -> None:
        """Carry out what is left, and wait until all messages have left."""
        self.go_on()
        for messages in self.under_way.values():
            while messages:
                messages.popleft()[1].wait()

    def _post(self) -> None:
        """Post what may be received from the next group on."""
        while not self.in_order and self.posted < self.horizons[self.next]:
            self.posted += 1
            for step in self.groups[self.posted]:
                if step.kind == "recv":
                    self._start_receive(step)

    def _start_receive(self, step: Instruction) -> None:
        tensor = self.runtime.allocate(step.action)
        handle = self.runtime.port.receive(tensor, step.peer)
        self.arriving[step.action] = tensor, handle

    def _start_send(self, step: Instruction) -> None:
        """Start to send a result, when there is room for one more."""
        runtime, tensor = self.runtime, self.runtime.results.pop(step.action)
        announce(runtime.parts, "before_send", runtime, step.action)
        under_way = self.under_way.setdefault(step.peer, deque())
        if len(under_way) == UNDER_WAY:
            under_way.popleft()[1].wait()
        under_way.append((tensor, runtime.port.send(tensor, step.peer)))
        announce(runtime.parts, "after_send", runtime, step.action, tensor)


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
