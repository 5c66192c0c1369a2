"""Plays a program through with sends that block: the proof that nothing hangs.

A *rendezvous*: a message passes when both ranks have posted it, one to send and one to
receive it, and neither goes on before it has arrived. No backend is stricter, so what
comes to its end here does so everywhere: on CUDA, where the messages of two ranks queue
up in one stream, and with large messages over TCP, which no buffer takes up.

Every rank carries out the same groups of steps in the same order whatever the times
are. So one play is a proof, as in `play`. Chapter 11.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from numbers import Real

from ddp_course.pipeline.play import Costs, Event, circle
from ddp_course.pipeline.program import Group, Program, Step
from ddp_course.pipeline.schedule import Action, ScheduleError


def rendezvous(program: Program, costs: Costs | None = None) -> tuple[Event, ...]:
    """Return what happens when, in an order in which it could happen one by one.

    Raises ScheduleError if ranks come to wait for each other, if one receives another
    message than is sent to it, and if one sends or needs what it has not; ValueError
    for costs that do not fit. Chapter 11.
    """
    return _Rendezvous(program, costs or Costs()).run()


@dataclass
class _Link:
    """The messages of one rank for another: what was posted when, in its order."""

    sent: list[tuple[Action, Real]] = field(default_factory=list)
    received: list[tuple[Action, Real]] = field(default_factory=list)


class _Rendezvous:
    """All ranks, each at one group of its row."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.at = [0] * len(program.ranks)  # which group comes next
        self.clock: list[Real] = [0] * len(program.ranks)
        self.has: list[set[Action]] = [set() for _ in program.ranks]  # made or received
        self.links: dict[tuple[int, int], _Link] = defaultdict(_Link)
        self.posted: dict[int, list[int]] = {}  # per rank, its messages' numbers
        self.events: list[Event] = []

    def run(self) -> tuple[Event, ...]:
        """Let the ranks go on in turns until none can."""
        ranks = range(len(self.at))
        while sum(self._go(rank) for rank in ranks):
            pass
        waits = {rank: self._waits(rank) for rank in ranks if self._group(rank)}
        if waits:
            raise ScheduleError(circle(waits))
        return tuple(self.events)

    def _group(self, rank: int) -> Group | None:
        row = self.program.ranks[rank]
        return row[self.at[rank]] if self.at[rank] < len(row) else None

    def _go(self, rank: int) -> bool:
        """Carry out groups until one must wait; return whether there was any."""
        before = self.at[rank]
        while group := self._group(rank):
            if group[0].kind == "compute":
                self._compute(rank, group[0].action)
            elif not self._exchange(rank, group):
                break
            self.at[rank] += 1
        return self.at[rank] > before

    def _compute(self, rank: int, action: Action) -> None:
        for need in self.program.schedule.needs(action):
            if need not in self.has[rank]:
                raise ScheduleError(
                    f"rank {rank} runs {action} without {need}, which it needs"
                )
        start = self.clock[rank]
        self.clock[rank] = start + self.costs.of(action)
        self.has[rank].add(action)
        self.events.append(Event(rank, action, start, self.clock[rank]))

    def _exchange(self, rank: int, group: Group) -> bool:
        """Post all messages, the first time; return whether all have arrived."""
        if rank not in self.posted:
            self.posted[rank] = [self._post(rank, step) for step in group]
        numbers = self.posted[rank]
        arrivals = [
            self._arrival(rank, *message)
            for message in zip(group, numbers, strict=True)
        ]
        if None in arrivals:
            return False
        self.clock[rank] = max(arrivals)
        self.has[rank].update(step.action for step in group if step.kind == "recv")
        del self.posted[rank]
        return True

    def _post(self, rank: int, step: Step) -> int:
        """Put a message on its link; return its number there."""
        if step.kind == "send" and step.action not in self.has[rank]:
            raise ScheduleError(
                f"rank {rank} sends {step.action}, which it has not made"
            )
        link = self.links[_ends(rank, step)]
        mine = link.sent if step.kind == "send" else link.received
        mine.append((step.action, self.clock[rank]))
        return len(mine) - 1

    def _arrival(self, rank: int, step: Step, number: int) -> Real | None:
        """Return when a message arrives, or None if only one side has posted it."""
        src, dst = _ends(rank, step)
        link = self.links[src, dst]
        if number >= min(len(link.sent), len(link.received)):
            return None
        (sent, start), (received, ready) = link.sent[number], link.received[number]
        if sent != received:
            raise ScheduleError(
                f"rank {dst} receives {received} from rank {src}, which sends {sent}"
            )
        return max(start, ready) + self.costs.send

    def _waits(self, rank: int) -> tuple[str, int]:
        """Return in words which message a rank waits for, and the other rank."""
        for step, number in zip(self._group(rank), self.posted[rank], strict=True):
            if self._arrival(rank, step, number) is None:
                break
        way = "sends {} to" if step.kind == "send" else "receives {} from"
        return f"{way.format(step.action)} rank {step.peer}", step.peer


def _ends(rank: int, step: Step) -> tuple[int, int]:
    """Return who sends and who receives."""
    return (rank, step.peer) if step.kind == "send" else (step.peer, rank)
