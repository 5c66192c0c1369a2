"""Run a program in virtual time, without a process: when does each action run?

An action begins when its rank is free and its inputs have arrived, and lasts as long as
`Costs` says. If every rank finishes its row in one run, it does so in every run, on
ranks of any speed, because each rank's order is fixed (Kahn 1974, "The semantics of a
simple language for parallel programming"). If not, ranks wait for each other in a
circle, in every run. Messages are of two kinds:

    buffered   are sent as soon as their action ends, and only the action that needs a
               message waits for it: the best that isend and irecv can do
    blocking   pass when one rank has posted the send and the other the receive, and
               both wait until then (a rendezvous). No backend is stricter, so a program
               that finishes here finishes everywhere: also on CUDA, where messages
               queue up in one stream, and with large messages over TCP

Chapters 10 and 11.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import NoReturn

from ddp_course.pipeline.program import (
    Instruction,
    InstructionGroup,
    Program,
    TimedAction,
    describe_circle,
    run_in_time,
)
from ddp_course.pipeline.schedule import Action, ScheduleError
from ddp_course.theory.checks import check_not_negative

# The sides of a message, "send" or "recv" -> (action, time when it was posted)
Sides = dict[str, tuple[Action, Real]]


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


def play(
    program: Program, costs: Costs | None = None, *, blocking: bool = False
) -> tuple[TimedAction, ...]:
    """Return when each action runs; the result is sorted so that inputs come first.

    Without `costs`, F, I and W take 1 each, B takes 2 and messages no time. Raises
    ScheduleError if ranks wait for each other, or for an action that no rank runs; with
    `blocking` also if a rank receives another message than its peer sends, or sends or
    needs a result that it does not have. Raises ValueError for costs that do not fit.
    Chapters 10 and 11.
    """
    costs = costs or Costs()
    if blocking:
        return _BlockingPlay(program, costs).run()
    rows = [
        [group[0].action for group in row if group[0].kind == "compute"]
        for row in program.ranks
    ]
    return run_in_time(replace(program.schedule, ranks=rows), costs.of, costs.send)


class _BlockingPlay:
    """A simulated run with blocking messages: each rank's place in its row."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.schedule, self.costs, self.rows = program.schedule, costs, program.ranks
        self.at = [0] * len(self.rows)  # per rank, the index of its next group
        self.clock: list[Real] = [0] * len(self.rows)
        self.events: list[TimedAction] = []
        self.has: list[set[Action]] = [set() for _ in self.rows]  # results of each rank
        # (sender, receiver) -> messages that only one of the two has posted
        self.half: dict[tuple[int, int], deque[Sides]] = {}
        self.waiting: dict[int, list[Sides]] = {}  # rank -> messages it waits for

    def run(self) -> tuple[TimedAction, ...]:
        """Advance the ranks in turns until none can go on."""
        ranks, moved = range(len(self.rows)), True
        while moved:
            before = list(self.at)
            for rank in ranks:
                while self.at[rank] < len(self.rows[rank]) and self._step(rank):
                    self.at[rank] += 1
            moved = self.at != before
        stuck = [rank for rank in ranks if self.at[rank] < len(self.rows[rank])]
        if stuck:
            self._fail(describe_circle({rank: self._waits(rank) for rank in stuck}))
        return tuple(self.events)

    def _fail(self, words: str) -> NoReturn:
        raise ScheduleError(f"{self.schedule.name}: {words}")

    def _step(self, rank: int) -> bool:
        """Execute a rank's next group; return False if it must wait."""
        group = self.rows[rank][self.at[rank]]
        if group[0].kind == "compute":
            self._compute(rank, group[0].action)
            return True
        return self._exchange(rank, group)

    def _compute(self, rank: int, action: Action) -> None:
        """Run an action; its messages have advanced the clock already."""
        for need in self.schedule.needs(action):
            if need not in self.has[rank]:
                lacks = f"without {need}, which it needs"
                self._fail(f"rank {rank} runs {action} {lacks}")
        start = self.clock[rank]
        self.clock[rank] = start + self.costs.of(action)
        self.events.append(TimedAction(rank, action, start, self.clock[rank]))
        self.has[rank].add(action)

    def _exchange(self, rank: int, group: InstructionGroup) -> bool:
        """Post a group's messages in the first call; return whether all have passed."""
        if rank not in self.waiting:
            self.waiting[rank] = [self._post(rank, step) for step in group]
        if any(len(sides) < 2 for sides in self.waiting[rank]):
            return False
        posted = (side for sides in self.waiting.pop(rank) for side in sides.values())
        self.clock[rank] = max(when for _, when in posted) + self.costs.send
        self.has[rank].update(step.action for step in group if step.kind == "recv")
        return True

    def _post(self, rank: int, step: Instruction) -> Sides:
        """Post one side of a message; match the peer's side, if it is posted."""
        link = (rank, step.peer) if step.kind == "send" else (step.peer, rank)
        if step.kind == "send" and step.action not in self.has[rank]:
            self._fail(f"rank {rank} sends {step.action}, which it has not computed")
        half = self.half.setdefault(link, deque())
        if not half or step.kind in half[0]:
            half.append({step.kind: (step.action, self.clock[rank])})
            return half[-1]
        sides = half.popleft()
        sides[step.kind] = step.action, self.clock[rank]
        (send, _), (receive, _) = sides["send"], sides["recv"]
        if send != receive:
            self._fail(
                f"rank {link[1]} receives {receive} from rank {link[0]}, which sends "
                f"{send}"
            )
        return sides

    def _waits(self, rank: int) -> tuple[str, int]:
        """Return a text with the message that a rank waits for, and the peer."""
        group = self.rows[rank][self.at[rank]]
        posted = zip(group, self.waiting[rank], strict=True)
        step = next(step for step, sides in posted if len(sides) < 2)
        verb = "sends {} to" if step.kind == "send" else "receives {} from"
        return f"{verb.format(step.action)} rank {step.peer}", step.peer
