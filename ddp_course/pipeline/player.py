"""What happens when: all ranks carry out a program in virtual time, without a process.

An action begins when its rank is free and what it needs is there, and lasts as long as
`Costs` says. If every rank comes to the end of its row once, every run will, on ranks
of any speed: each takes its actions in the same order whatever the times are (Kahn
1974, "The semantics of a simple language for parallel programming"). If not, ranks wait
for each other in a circle, and will in every run. Messages are of two kinds:

    buffered   start when they are made, and nobody waits for one but the action that
               needs it: what isend and irecv can do at best
    blocking   pass when both ranks have posted them, one to send and one to receive,
               and neither goes on before (a rendezvous). No backend is stricter, so
               what comes to its end here does so everywhere: on CUDA, where messages
               queue up in one stream, and with large messages over TCP

Chapters 10 and 11.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import NoReturn

from ddp_course.pipeline.program import (
    Group,
    Instruction,
    Program,
    Timed,
    circle,
    in_time,
)
from ddp_course.pipeline.schedule import Action, ScheduleError
from ddp_course.theory.checks import check_not_negative

Sides = dict[str, tuple[Action, Real]]  # "send", "recv" -> what is posted, and when


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
        total = 0
        for op in "IW" if action.op == "B" else action.op:
            cost, stage = getattr(self, op), action.stage
            if isinstance(cost, Sequence):
                if stage >= len(cost):
                    had = f"{op} has {len(cost)} costs"
                    raise ValueError(f"{had}; there is a stage {stage}")
                cost = cost[stage]
            total += cost
        return total


def play(
    program: Program, costs: Costs | None = None, *, blocking: bool = False
) -> tuple[Timed, ...]:
    """Return what happens when, in an order in which it could happen one by one.

    Without `costs`, F, I and W take 1 each, B takes 2 and messages no time. Raises
    ScheduleError if ranks come to wait for each other or for what no rank runs, and
    with `blocking` if one receives another message than is sent to it, or sends or
    needs what it has not; ValueError for costs that do not fit. Chapters 10 and 11.
    """
    costs = costs or Costs()
    if blocking:
        return _BlockingPlay(program, costs).run()
    rows = [
        [group[0].action for group in row if group[0].kind == "compute"]
        for row in program.ranks
    ]
    return in_time(replace(program.schedule, ranks=rows), costs.of, costs.send)


class _BlockingPlay:
    """All ranks, each at one group of its row; messages block."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.schedule, self.costs, self.rows = program.schedule, costs, program.ranks
        self.at = [0] * len(self.rows)  # which group comes next
        self.clock: list[Real] = [0] * len(self.rows)
        self.done: list[Timed] = []
        # The results that a rank has; by sender and receiver, messages of which one
        # side is posted; and by rank, the messages that it waits for.
        self.has: list[set[Action]] = [set() for _ in self.rows]
        self.half: dict[tuple[int, int], deque[Sides]] = {}
        self.waiting: dict[int, list[Sides]] = {}

    def run(self) -> tuple[Timed, ...]:
        """Let the ranks go on in turns until none can."""
        ranks, moved = range(len(self.rows)), True
        while moved:
            before = list(self.at)
            for rank in ranks:
                while self.at[rank] < len(self.rows[rank]) and self._step(rank):
                    self.at[rank] += 1
            moved = self.at != before
        left = [rank for rank in ranks if self.at[rank] < len(self.rows[rank])]
        if left:
            self._fail(circle({rank: self._waits(rank) for rank in left}))
        return tuple(self.done)

    def _fail(self, words: str) -> NoReturn:
        raise ScheduleError(f"{self.schedule.name}: {words}")

    def _step(self, rank: int) -> bool:
        """Carry out a rank's next group; return whether it could be."""
        group = self.rows[rank][self.at[rank]]
        if group[0].kind == "compute":
            self._compute(rank, group[0].action)
            return True
        return self._exchange(rank, group)

    def _compute(self, rank: int, action: Action) -> None:
        """Run an action; its messages have moved the clock already."""
        for need in self.schedule.needs(action):
            if need not in self.has[rank]:
                lacks = f"without {need}, which it needs"
                self._fail(f"rank {rank} runs {action} {lacks}")
        start = self.clock[rank]
        self.clock[rank] = start + self.costs.of(action)
        self.done.append(Timed(rank, action, start, self.clock[rank]))
        self.has[rank].add(action)

    def _exchange(self, rank: int, group: Group) -> bool:
        """Post all messages, the first time; return whether all have arrived."""
        if rank not in self.waiting:
            self.waiting[rank] = [self._post(rank, step) for step in group]
        if any(len(sides) < 2 for sides in self.waiting[rank]):
            return False
        posted = (side for sides in self.waiting.pop(rank) for side in sides.values())
        self.clock[rank] = max(when for _, when in posted) + self.costs.send
        self.has[rank].update(step.action for step in group if step.kind == "recv")
        return True

    def _post(self, rank: int, step: Instruction) -> Sides:
        """Post a side of a message: of a new one, or of that which waits for it."""
        link = (rank, step.peer) if step.kind == "send" else (step.peer, rank)
        if step.kind == "send" and step.action not in self.has[rank]:
            which = f"{step.action}, which it has not made"
            self._fail(f"rank {rank} sends {which}")
        half = self.half.setdefault(link, deque())
        if not half or step.kind in half[0]:
            half.append({step.kind: (step.action, self.clock[rank])})
            return half[-1]
        sides = half.popleft()
        sides[step.kind] = step.action, self.clock[rank]
        (sent, _), (received, _) = sides["send"], sides["recv"]
        if sent != received:
            what = f"{received} from rank {link[0]}, which sends {sent}"
            self._fail(f"rank {link[1]} receives {what}")
        return sides

    def _waits(self, rank: int) -> tuple[str, int]:
        """Return in words which message a rank waits for, and its other rank."""
        group = self.rows[rank][self.at[rank]]
        both = zip(group, self.waiting[rank], strict=True)
        step = next(step for step, sides in both if len(sides) < 2)
        verb = "sends {} to" if step.kind == "send" else "receives {} from"
        return f"{verb.format(step.action)} rank {step.peer}", step.peer
