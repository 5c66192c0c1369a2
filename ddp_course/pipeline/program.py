"""Programs: what each rank computes, sends and receives, in this order.

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

Chapters 10 and 11.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType

from ddp_course.pipeline.schedule import Action, Schedule, ScheduleError

UNIT_TIMES = MappingProxyType({"F": 1, "B": 2, "I": 1, "W": 1})  # of each op


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
    knows no tags. `add_messages` makes one of a schedule.
    """

    schedule: Schedule
    ranks: tuple[tuple[Group, ...], ...]

    def __str__(self) -> str:
        rows = ("  ".join("+".join(map(str, g)) for g in row) for row in self.ranks)
        return "\n".join(f"rank {rank} | {row}" for rank, row in enumerate(rows))


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
    events = sorted(in_time(schedule), key=lambda event: (event.end, event.rank))
    for number, event in enumerate(events):
        rank, action = event.rank, event.action
        rows[rank].append((event.start, 1, number, Instruction("compute", action)))
        peer = schedule.receiver(action)
        if peer is not None:  # at the same time, messages come before actions
            made = event.end, 0, number
            rows[rank].append((*made, Instruction("send", action, peer)))
            rows[peer].append((*made, Instruction("recv", action, rank)))
    steps = ([step for *_, step in sorted(row)] for row in rows)
    return Program(schedule, tuple(map(_grouped, steps)))


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


# ---- when each action can run --------------------------------------------------------


def in_time(
    schedule: Schedule,
    seconds: Callable[[Action], Real] = lambda action: UNIT_TIMES[action.op],
    send: Real = 0,
) -> tuple[Timed, ...]:
    """Return when each action runs if ranks wait for nothing but what they need.

    In an order in which the actions could run one by one. `seconds` is how long an
    action takes, `send` how long its result travels to another rank. Raises
    ScheduleError if the schedule comes to no end.
    """
    rows, done = schedule.ranks, {}
    following, clock = [0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while following[rank] < len(row):
                action = row[following[rank]]
                needs = [done.get(need) for need in schedule.needs(action)]
                if None in needs:
                    break
                ends = (need.end + send * (need.rank != rank) for need in needs)
                start = max((clock[rank], *ends))
                clock[rank] = start + seconds(action)
                done[action] = Timed(rank, action, start, clock[rank])
                following[rank] += 1
                moved = True
    waits = {
        rank: _what_is_missing(schedule, rank, row[following[rank]], done)
        for rank, row in enumerate(rows)
        if following[rank] < len(row)
    }
    if waits:
        raise ScheduleError(f"{schedule.name}: {circle(waits)}")
    return tuple(done.values())


def _what_is_missing(
    schedule: Schedule, rank: int, action: Action, done: Mapping[Action, Timed]
) -> tuple[str, int | None]:
    """Return in words what `action` of a rank waits for, and which rank has it."""
    need = next(need for need in schedule.needs(action) if need not in done)
    rows = enumerate(schedule.ranks)
    home = next((other for other, row in rows if need in row), None)
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
