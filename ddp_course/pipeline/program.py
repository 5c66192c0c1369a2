"""Programs: what each rank computes, sends and receives; and what happens when.

`play` lets all ranks carry out their rows in virtual time, without any process. An
action begins when its rank is free and what it needs is there, and lasts as long as
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

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from ddp_course.pipeline.schedule import Action, Schedule, ScheduleError
from ddp_course.theory.checks import check_not_negative


@dataclass(frozen=True)
class Instruction:
    """One thing that a rank does: compute an action, or send or receive its result.

    Attributes:
        kind: "compute", "send" or "recv".
        action: what is computed, or what has made the message.
        peer: the rank to send to or to receive from; None for "compute".
    """

    kind: str
    action: Action
    peer: int | None = None

    def __str__(self) -> str:
        """Return 0F1, or with >0F1 that its result is sent, with <0F1 received."""
        return {"compute": "", "send": ">", "recv": "<"}[self.kind] + str(self.action)


Group = tuple[Instruction, ...]  # one action, or messages that are posted together


@dataclass(frozen=True)
class Program:
    """For each rank the groups of instructions that it carries out, one by one.

    A group is one "compute", or one or more messages that are posted together. Of two
    messages from one rank to another the first sent must be the first received: NCCL
    knows no tags. `messages.add_messages` makes one of a schedule.
    """

    schedule: Schedule
    ranks: tuple[tuple[Group, ...], ...]

    def __str__(self) -> str:
        """A row of text for each rank."""
        rows = ("  ".join("+".join(map(str, g)) for g in row) for row in self.ranks)
        return "\n".join(f"rank {rank} | {row}" for rank, row in enumerate(rows))


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
        total = 0
        for op in "IW" if action.op == "B" else action.op:
            cost = getattr(self, op)
            if not isinstance(cost, Sequence):
                total += cost
            elif action.stage < len(cost):
                total += cost[action.stage]
            else:
                raise ValueError(
                    f"{op} has {len(cost)} costs; there is a stage {action.stage}"
                )
        return total


@dataclass(frozen=True)
class Timed:
    """`rank` took `action` from `start` to `end`, in the unit of the costs."""

    rank: int
    action: Action
    start: Real
    end: Real


def play(
    program: Program, costs: Costs | None = None, *, blocking: bool = False
) -> tuple[Timed, ...]:
    """Return what happens when, in an order in which it could happen one by one.

    Without `costs`, F, I and W take 1 each, B takes 2 and messages no time. Raises
    ScheduleError if ranks come to wait for each other or for what no rank runs, and
    with `blocking` if one receives another message than is sent to it, or sends or
    needs what it has not; ValueError for costs that do not fit. Chapters 10 and 11.
    """
    kind = _Blocking if blocking else _Buffered
    return kind(program, costs or Costs()).run()


class _Buffered:
    """All ranks, each at one group of its row."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.schedule, self.costs = program.schedule, costs
        self.rows = program.ranks
        self.at = [0] * len(self.rows)  # which group comes next
        self.clock: list[Real] = [0] * len(self.rows)
        self.done: dict[Action, Timed] = {}

    def run(self) -> tuple[Timed, ...]:
        """Let the ranks go on in turns until none can."""
        ranks = range(len(self.rows))
        while sum(self._go(rank) for rank in ranks):
            pass
        waits = {r: self._waits(r) for r in ranks if self.at[r] < len(self.rows[r])}
        if waits:
            raise ScheduleError(circle(waits))
        return tuple(self.done.values())

    def _go(self, rank: int) -> int:
        """Carry out groups until one must wait; return how many."""
        before, row = self.at[rank], self.rows[rank]
        while self.at[rank] < len(row):
            group = row[self.at[rank]]
            step = self._compute if group[0].kind == "compute" else self._exchange
            if not step(rank, group):
                break
            self.at[rank] += 1
        return self.at[rank] - before

    def _compute(self, rank: int, group: Group) -> bool:
        """Run an action if all is there that it needs; return whether it was."""
        start, action = self.clock[rank], group[0].action
        for need in self.schedule.needs(action):
            if need not in self.done:
                return False
            made = self.done[need]
            start = max(start, made.end + self.costs.send * (made.rank != rank))
        self._run(rank, action, start)
        return True

    def _run(self, rank: int, action: Action, start: Real) -> None:
        self.clock[rank] = start + self.costs.of(action)
        self.done[action] = Timed(rank, action, start, self.clock[rank])

    def _exchange(self, rank: int, group: Group) -> bool:
        return True  # nobody waits for a message but the action that needs it

    def _waits(self, rank: int) -> tuple[str, int | None]:
        """Return what a rank is at and lacks, in words, and whose it is."""
        groups = self.rows[rank][self.at[rank] :]
        action = next(g[0].action for g in groups if g[0].kind == "compute")
        needs = self.schedule.needs(action)
        need = next(need for need in needs if need not in self.done)
        rows = enumerate(self.schedule.ranks)
        home = next((other for other, row in rows if need in row), None)
        if home == rank:
            return f"runs {action} before {need}, which it needs", home
        of_rank = "" if home is None else f" of rank {home}"
        return f"is at {action}, which needs {need}{of_rank}", home


class _Blocking(_Buffered):
    """The same, with messages that pass when both ranks have posted them."""

    def __init__(self, program: Program, costs: Costs) -> None:
        super().__init__(program, costs)
        self.has: list[set[Action]] = [set() for _ in self.rows]  # made or received
        # (sender, receiver) -> "send" or "recv" -> what was posted when, in order
        self.links: dict = defaultdict(lambda: {"send": [], "recv": []})
        self.posted: dict[int, list[int]] = {}  # per rank, its messages' numbers

    def _compute(self, rank: int, group: Group) -> bool:
        action = group[0].action
        for need in self.schedule.needs(action):
            if need not in self.has[rank]:
                raise ScheduleError(
                    f"rank {rank} runs {action} without {need}, which it needs"
                )
        self._run(rank, action, self.clock[rank])
        self.has[rank].add(action)
        return True

    def _exchange(self, rank: int, group: Group) -> bool:
        """Post all messages, the first time; return whether all have arrived."""
        if rank not in self.posted:
            self.posted[rank] = [self._post(rank, step) for step in group]
        arrivals = self._arrivals(rank, group)
        if None in arrivals:
            return False
        self.clock[rank] = max(arrivals)
        self.has[rank].update(step.action for step in group if step.kind == "recv")
        del self.posted[rank]
        return True

    def _post(self, rank: int, step: Instruction) -> int:
        """Put a message on its link; return its number there."""
        if step.kind == "send" and step.action not in self.has[rank]:
            raise ScheduleError(
                f"rank {rank} sends {step.action}, which it has not made"
            )
        mine = self.links[_ends(rank, step)][step.kind]
        mine.append((step.action, self.clock[rank]))
        return len(mine) - 1

    def _arrivals(self, rank: int, group: Group) -> list[Real | None]:
        """Return when each message arrives, None if only one side has posted it."""
        numbers = self.posted[rank]
        return [self._arrival(rank, *m) for m in zip(group, numbers, strict=True)]

    def _arrival(self, rank: int, step: Instruction, number: int) -> Real | None:
        src, dst = _ends(rank, step)
        sends, receives = self.links[src, dst].values()
        if number >= min(len(sends), len(receives)):
            return None
        (sent, start), (received, ready) = sends[number], receives[number]
        if sent != received:
            raise ScheduleError(
                f"rank {dst} receives {received} from rank {src}, which sends {sent}"
            )
        return max(start, ready) + self.costs.send

    def _waits(self, rank: int) -> tuple[str, int]:
        """Return in words which message a rank waits for, and the other rank."""
        group = self.rows[rank][self.at[rank]]
        step = group[self._arrivals(rank, group).index(None)]
        verb = "sends {} to" if step.kind == "send" else "receives {} from"
        return f"{verb.format(step.action)} rank {step.peer}", step.peer


def _ends(rank: int, step: Instruction) -> tuple[int, int]:
    """Return who sends and who receives."""
    return (rank, step.peer) if step.kind == "send" else (step.peer, rank)


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
