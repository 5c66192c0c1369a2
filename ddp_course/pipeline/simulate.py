"""Simulate a schedule in virtual time: when does each rank compute, when does it wait?

    print(simulate_schedule(gpipe(2, 3)))

    gpipe: 2 stages on 2 ranks, 3 microbatches; 1/4 of the time idle
    rank 0 | 0F0 0F1 0F2     0B0 ... 0B1 ... 0B2 ...
    rank 1 |     1F0 1F1 1F2 1B0 ... 1B1 ... 1B2 ...

Chapters 10 and 11.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational, Real
from operator import attrgetter

from ddp_course.pipeline.checker import peak_activations
from ddp_course.pipeline.program import TimedAction, run_in_time
from ddp_course.pipeline.schedule import Action, Schedule
from ddp_course.theory.checks import check_not_negative

COLUMNS = 200  # the most columns of a printed chart


@dataclass(frozen=True)
class Costs:
    """The durations of actions and messages, in any unit. Fractions stay exact.

    Attributes:
        F: time of forward for one microbatch in one stage; or a sequence, one time for
            each stage.
        I: time of the gradient of the input, in the same form.
        W: time of the gradients of the weights, in the same form. B takes I + W.
        send: time of a message between ranks; messages do not slow each other down.

    Raises ValueError for a negative or infinite number, and if no action takes time.
    """

    F: Real | Sequence[Real] = 1
    I: Real | Sequence[Real] = 1  # noqa: E741
    W: Real | Sequence[Real] = 1
    send: Real = 0

    def __post_init__(self) -> None:
        check_not_negative("send", self.send)
        total = 0
        for op in "FIW":
            cost = getattr(self, op)
            for number in cost if isinstance(cost, Sequence) else [cost]:
                check_not_negative(op, number)
                total += number
        if not total:
            raise ValueError("F, I and W are all 0; at least one must be above 0")

    def of(self, action: Action) -> Real:
        """Return the duration of `action`; raise ValueError for an unknown stage."""
        total = 0
        for op in "IW" if action.op == "B" else action.op:
            cost, stage = getattr(self, op), action.stage
            if isinstance(cost, Sequence):
                if stage >= len(cost):
                    had = f"{op} has {len(cost)} costs, and there is a stage {stage}"
                    raise ValueError(f"{had}; it must have one for each stage")
                cost = cost[stage]
            total += cost
        return total


@dataclass(frozen=True)
class SimulatedSchedule:
    """A simulated run of a schedule. Times are in the unit of the costs.

    Attributes:
        schedule: the schedule that was simulated.
        events: the ranks' actions with start and end, in the order of their starts.
        peak_activations: the most that each rank stores, in microbatches.
    """

    schedule: Schedule
    events: tuple[TimedAction, ...]
    peak_activations: tuple[Fraction, ...]

    @property
    def makespan(self) -> Real:
        """The time from the first action's start to the last one's end."""
        starts = (event.start for event in self.events)
        return max(event.end for event in self.events) - min(starts)

    @property
    def busy(self) -> tuple[Real, ...]:
        """The time that each rank spends computing."""
        times: list[Real] = [0] * self.schedule.num_ranks
        for event in self.events:
            times[event.rank] += event.end - event.start
        return tuple(times)

    @property
    def idle(self) -> tuple[Real, ...]:
        """The share of the makespan in which each rank does not compute."""
        whole = self.makespan
        return tuple((whole - busy) / Fraction(whole) for busy in self.busy)

    @property
    def bubble(self) -> Real:
        """The share of all ranks' time in which they do not compute: mean of `idle`."""
        return sum(self.idle) / self.schedule.num_ranks

    def __str__(self) -> str:
        head = str(self.schedule).partition("\n")[0]
        head += f"; {_text(self.bubble)} of the time idle"
        return "\n".join([head, *_chart(self.schedule.num_ranks, self.events)])


def simulate_schedule(
    schedule: Schedule, costs: Costs | None = None
) -> SimulatedSchedule:
    """Return when each action runs, with the durations that `costs` defines.

    Without `costs`, F, I and W take 1 each, B takes 2 and messages no time: then the
    formulas for bubbles in `pipeline.schedules` are exact. Messages are sent as soon as
    their action ends, and only the action that needs a message waits for it. Raises
    ScheduleError for a schedule in which ranks wait for ever, ValueError for costs that
    do not fit. Chapters 10 and 11.
    """
    costs = costs or Costs()
    events = run_in_time(schedule, costs.of, costs.send)
    events = sorted(events, key=attrgetter("start", "end", "rank"))
    return SimulatedSchedule(schedule, tuple(events), peak_activations(schedule))


def _text(number: Real) -> str:
    return str(number) if isinstance(number, Rational) else f"{number:.3f}"


def _chart(num_ranks: int, events: Sequence[TimedAction]) -> list[str]:
    """Return a line for each rank: columns of time, or else start and end as text."""
    times = [time for event in events for time in (event.start, event.end)]
    column = _common(times)
    width = max(3, *(len(str(event.action)) for event in events))
    rows: list[list[str]] = [[] for _ in range(num_ranks)]
    for event in events:  # in the order of their starts
        row = rows[event.rank]
        if column is None:
            start, end = float(event.start), float(event.end)
            row.append(f"{event.action} {start:.4g}-{end:.4g}")
            continue
        row += [""] * (int(event.start / column) - len(row))
        row += [str(event.action)]
        row += ["..."] * (int(event.end / column) - len(row))
    cells = (" ".join(cell.ljust(width) for cell in row) for row in rows)
    return [f"rank {rank} | {line}".rstrip() for rank, line in enumerate(cells)]


def _common(times: Sequence[Real]) -> Fraction | None:
    """Return the longest duration that divides all times; None if it is too short."""
    if not all(isinstance(time, Rational) for time in times):
        return None
    exact = [Fraction(time) for time in times]
    parts = math.lcm(*(time.denominator for time in exact))
    column = Fraction(math.gcd(*(int(time * parts) for time in exact)), parts)
    return column if max(exact) <= COLUMNS * column else None
