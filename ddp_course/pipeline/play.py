"""Plays a schedule through in virtual time, without any process.

An action begins when its rank is free and what it needs is there, and lasts as long as
`Costs` says. If every rank comes to the end of its row once, every run will, on ranks
of any speed: each takes its actions in the same order whatever the times are (Kahn
1974, "The semantics of a simple language for parallel programming"). If not, then the
actions wait for each other in a circle, and will in every run. Chapters 10 and 11.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from ddp_course.pipeline.schedule import Action, Schedule, ScheduleError
from ddp_course.theory.checks import check_not_negative


@dataclass(frozen=True)
class Costs:
    """How long everything takes, in any unit; B takes I + W. Fractions stay exact.

    Attributes:
        F: of one microbatch in one stage; or a sequence, a number for each stage.
        I: likewise, of the gradient of the input.
        W: likewise, of the gradients of the weights.
        send: of a message from one rank to another, however many are on their way.

    Raises ValueError for a negative or infinite number, and if no action takes time.
    """

    F: Real | Sequence[Real] = 1
    I: Real | Sequence[Real] = 1  # noqa: E741
    W: Real | Sequence[Real] = 1
    send: Real = 0

    def __post_init__(self) -> None:
        """Check every number."""
        check_not_negative("send", self.send)
        total = 0
        for op in "FIW":
            cost = getattr(self, op)
            for number in cost if isinstance(cost, Sequence) else [cost]:
                check_not_negative(op, number)
                total += number
        if not total:
            raise ValueError("F, I and W are all 0; one at least must take time")

    def of(self, action: Action) -> Real:
        """Return how long `action` takes. Raises ValueError for an unknown stage."""
        if action.op == "B":
            return self._of("I", action.stage) + self._of("W", action.stage)
        return self._of(action.op, action.stage)

    def _of(self, op: str, stage: int) -> Real:
        cost = getattr(self, op)
        if not isinstance(cost, Sequence):
            return cost
        if stage >= len(cost):
            raise ValueError(f"{op} has {len(cost)} costs; there is a stage {stage}")
        return cost[stage]


@dataclass(frozen=True)
class Event:
    """`rank` took `action` from `start` to `end`, in the unit of the costs."""

    rank: int
    action: Action
    start: Real
    end: Real


def play(schedule: Schedule, costs: Costs | None = None) -> tuple[Event, ...]:
    """Return what happens when, in an order in which it could happen one by one.

    Messages start when they are made, and nobody waits for one but the action that
    needs it: what isend and irecv can do at best. Without `costs`, F, I and W take 1
    each, B takes 2 and messages no time. Raises ScheduleError if ranks come to wait for
    each other, or for what no rank runs, ValueError for costs that do not fit.
    Chapters 10 and 11.
    """
    costs = costs or Costs()
    done: dict[Action, Event] = {}
    left = [deque(row) for row in schedule.ranks]
    clock: list[Real] = [0] * schedule.num_ranks
    events: list[Event] = []
    while any(left):
        before = len(events)
        for rank, row in enumerate(left):
            while row and all(need in done for need in schedule.needs(row[0])):
                action = row.popleft()
                needs = [done[need] for need in schedule.needs(action)]
                there = [n.end + costs.send * (n.rank != rank) for n in needs]
                start = max([clock[rank], *there])
                clock[rank] = start + costs.of(action)
                done[action] = Event(rank, action, start, clock[rank])
                events.append(done[action])
        if len(events) == before:
            nexts = {rank: row[0] for rank, row in enumerate(left) if row}
            raise ScheduleError(_standstill(schedule, nexts, done))
    return tuple(events)


def circle(waits: Mapping[int, tuple[str, int | None]]) -> str:
    """Return in words why no rank can go on: who waits for whom, in a circle if so.

    `waits[rank]` is what the rank does and waits for, in words, and the rank that it
    waits for, or None if no rank ever does what it needs.
    """
    path = [min(waits)]
    while (peer := waits[path[-1]][1]) in waits and peer not in path:
        path.append(peer)
    if peer in path:
        path = path[path.index(peer) :]
        head = "ranks wait for each other: " if len(path) > 1 else ""
        return head + "; ".join(f"rank {rank} {waits[rank][0]}" for rank in path)
    never = "which no rank runs" if peer is None else f"but rank {peer} is at its end"
    return f"rank {path[-1]} {waits[path[-1]][0]}, {never}"


def _standstill(
    schedule: Schedule, nexts: Mapping[int, Action], done: Mapping[Action, Event]
) -> str:
    """Say what the ranks wait for whose next actions are `nexts`."""
    homes = {action: rank for rank, row in enumerate(schedule.ranks) for action in row}
    waits: dict[int, tuple[str, int | None]] = {}
    for rank, action in nexts.items():
        need = next(need for need in schedule.needs(action) if need not in done)
        home = homes.get(need)
        text = f"is at {action}, which needs {need}"
        if home == rank:
            text = f"runs {action} before {need}, which it needs"
        elif home is not None:
            text += f" of rank {home}"
        waits[rank] = text, home
    return circle(waits)
