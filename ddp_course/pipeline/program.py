"""Programs: what each rank computes, sends and receives; and what happens when.

A schedule says in which order a rank computes. What it makes must reach the rank that
needs it, and for a message to pass, both must be ready for it: one in a send, the other
in a receive. When? The plain answer, a receive before the action that needs it and a
send after the action that made it, one at a time (`fused=False`), is 1F1B's undoing:

    rank 0 | 0F0  >0F0  0F1  >0F1  <1B0  0B0 ...
    rank 1 | <0F0  1F0  1B0  >1B0  <0F1  1F1 ...

Rank 0 wants to send 0F1 while rank 1 wants to send 1B0. If a send lasts until the other
rank receives it, both wait for ever. So a message is received as soon as it has been
made, even if other actions come before the one that needs it; and what a rank sends and
receives between two actions is *posted* together:

    rank 0 | 0F0  >0F0  0F1  >0F1+<1B0  0B0  0F2  >0F2+<1B1 ...
    rank 1 | <0F0  1F0  <0F1  1B0  >1B0  1F1  1B1  <0F2+>1B1 ...

Megatron-LM's send_forward_recv_backward, PyTorch's batch_isend_irecv.

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

from collections import deque
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
Sides = dict[str, tuple[Action, Real]]  # "send", "recv" -> what is posted, and when


@dataclass(frozen=True)
class Program:
    """For each rank the groups of instructions that it carries out, one by one.

    A group is one "compute", or one or more messages that are posted together. Of two
    messages from one rank to another the first sent must be the first received: NCCL
    knows no tags. `add_messages` makes one of a schedule.
    """

    schedule: Schedule
    ranks: tuple[tuple[Group, ...], ...]

    def __str__(self) -> str:
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


@dataclass(frozen=True)
class Timed:
    """`rank` took `action` from `start` to `end`, in the unit of the costs."""

    rank: int
    action: Action
    start: Real
    end: Real


# ---- messages -----------------------------------------------------------------------


def add_messages(schedule: Schedule, *, fused: bool = True) -> Program:
    """Return what each rank computes, sends and receives to carry out `schedule`.

    With `fused`, the schedule is played (F, I and W take 1, B takes 2). A message is
    posted when it has been made: by the sender after the action that made it, by the
    receiver after the action that it is at then. Two messages are thus in the same
    order on all ranks: even if every send lasts until it is received, and however slow
    some ranks are, none waits for ever. Without `fused`, each message is on its own,
    received just before it is needed; `check` says if that can work.

    A result that is needed on the rank that made it is no message. Raises ScheduleError
    with `fused` if the schedule comes to no end. Source: PyTorch's `_add_send_recv`.
    Chapter 11.
    """
    every = range(schedule.num_ranks)
    alone = Program(schedule, tuple(_one_by_one(schedule, rank) for rank in every))
    if not fused:
        return alone
    rows: list[list[tuple[Real, int, int, Instruction]]] = [[] for _ in schedule.ranks]
    events = sorted(play(alone), key=lambda event: (event.end, event.rank))
    for number, event in enumerate(events):
        rank, action = event.rank, event.action
        rows[rank].append((event.start, 1, number, Instruction("compute", action)))
        peer = schedule.receiver(action)
        if peer is not None:  # at the same time, messages come before actions
            made = event.end, 0, number
            rows[rank].append((*made, Instruction("send", action, peer)))
            rows[peer].append((*made, Instruction("recv", action, rank)))
    in_time = ([step for *_, step in sorted(row)] for row in rows)
    return Program(schedule, tuple(map(_grouped, in_time)))


def _one_by_one(schedule: Schedule, rank: int) -> tuple[Group, ...]:
    """Receive just before an action, send right after it, one message at a time."""
    groups: list[Group] = []
    for action in schedule.ranks[rank]:
        source, peer = schedule.source(action), schedule.receiver(action)
        home = None if source is None else schedule.homes.get(source.stage, (rank,))[0]
        if home not in (None, rank):
            groups.append((Instruction("recv", source, home),))
        groups.append((Instruction("compute", action),))
        if peer is not None:
            groups.append((Instruction("send", action, peer),))
    return tuple(groups)


def _grouped(steps: Sequence[Instruction]) -> tuple[Group, ...]:
    """Put all messages between two actions into one group."""
    groups: list[Group] = []
    for step in steps:
        messages = groups and "compute" not in (step.kind, groups[-1][0].kind)
        before = groups.pop() if messages else ()
        groups.append((*before, step))
    return tuple(groups)


# ---- what happens when ---------------------------------------------------------------


def play(
    program: Program, costs: Costs | None = None, *, blocking: bool = False
) -> tuple[Timed, ...]:
    """Return what happens when, in an order in which it could happen one by one.

    Without `costs`, F, I and W take 1 each, B takes 2 and messages no time. Raises
    ScheduleError if ranks come to wait for each other or for what no rank runs, and
    with `blocking` if one receives another message than is sent to it, or sends or
    needs what it has not; ValueError for costs that do not fit. Chapters 10 and 11.
    """
    return _Play(program, costs or Costs(), blocking).run()


class _Play:
    """All ranks, each at one group of its row."""

    def __init__(self, program: Program, costs: Costs, blocking: bool) -> None:
        self.schedule, self.costs, self.blocking = program.schedule, costs, blocking
        self.rows = program.ranks
        self.at = [0] * len(self.rows)  # which group comes next
        self.clock: list[Real] = [0] * len(self.rows)
        self.done: dict[Action, Timed] = {}
        # Blocking: what a rank has made or received; by sender and receiver, messages
        # of which one side is posted; and the messages of a rank that waits for them.
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
            raise ScheduleError(circle({rank: self._waits(rank) for rank in left}))
        return tuple(self.done.values())

    def _step(self, rank: int) -> bool:
        """Carry out a rank's next group; return whether it could be."""
        group = self.rows[rank][self.at[rank]]
        if group[0].kind == "compute":
            return self._compute(rank, group[0].action)
        return self._exchange(rank, group) if self.blocking else True

    def _compute(self, rank: int, action: Action) -> bool:
        """Run an action if all is there that it needs."""
        start = self.clock[rank]
        for need in self.schedule.needs(action):
            if self.blocking and need not in self.has[rank]:
                lacks = f"without {need}, which it needs"
                raise ScheduleError(f"rank {rank} runs {action} {lacks}")
            if need not in self.done:
                return False
            made = self.done[need]
            if not self.blocking:  # else its message has moved the clock already
                start = max(start, made.end + self.costs.send * (made.rank != rank))
        self.clock[rank] = start + self.costs.of(action)
        self.done[action] = Timed(rank, action, start, self.clock[rank])
        self.has[rank].add(action)
        return True

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
            raise ScheduleError(f"rank {rank} sends {which}")
        half = self.half.setdefault(link, deque())
        if not half or step.kind in half[0]:
            half.append({step.kind: (step.action, self.clock[rank])})
            return half[-1]
        sides = half.popleft()
        sides[step.kind] = step.action, self.clock[rank]
        (sent, _), (received, _) = sides["send"], sides["recv"]
        if sent != received:
            what = f"{received} from rank {link[0]}, which sends {sent}"
            raise ScheduleError(f"rank {link[1]} receives {what}")
        return sides

    def _waits(self, rank: int) -> tuple[str, int | None]:
        """Return what a rank is at and lacks, in words, and whose it is."""
        groups = self.rows[rank][self.at[rank] :]
        if self.blocking:
            both = zip(groups[0], self.waiting[rank], strict=True)
            step = next(step for step, sides in both if len(sides) < 2)
            verb = "sends {} to" if step.kind == "send" else "receives {} from"
            return f"{verb.format(step.action)} rank {step.peer}", step.peer
        action = next(g[0].action for g in groups if g[0].kind == "compute")
        needs, rows = self.schedule.needs(action), self.schedule.ranks
        need = next(need for need in needs if need not in self.done)
        home = next((r for r, row in enumerate(rows) if need in row), None)
        if home == rank:
            return f"runs {action} before {need}, which it needs", home
        of_rank = "" if home is None else f" of rank {home}"
        return f"is at {action}, which needs {need}{of_rank}", home


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
