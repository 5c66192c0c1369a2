"""Programs: what each rank computes, sends and receives, in this order.

A schedule defines in which order a rank computes. Each result must reach the rank that
needs it, and a message passes only if one rank is in a send and the other in the
matching receive. The obvious order, each receive just before the action that needs it
and each send just after its action, one at a time (`fused=False`), deadlocks in 1F1B:

    rank 0 | 0F0  >0F0  0F1  >0F1  <1B0  0B0 ...
    rank 1 | <0F0  1F0  1B0  >1B0  <0F1  1F1 ...

Rank 0 sends 0F1 while rank 1 sends 1B0. If a send blocks until the other rank receives,
both wait for ever. So a rank receives a message as soon as it has been sent, even if
other actions come before the one that needs it; and all messages that a rank sends and
receives between two actions are *posted* together:

    rank 0 | 0F0  >0F0  0F1  >0F1+<1B0  0B0  0F2  >0F2+<1B1 ...
    rank 1 | <0F0  1F0  <0F1  1B0  >1B0  1F1  1B1  <0F2+>1B1 ...

Megatron-LM's send_forward_recv_backward and PyTorch's batch_isend_irecv do the same.
Chapters 10 and 11.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import MappingProxyType

from ddp_course.pipeline.schedule import Action, Schedule, ScheduleError

UNIT_TIMES = MappingProxyType({"F": 1, "B": 2, "I": 1, "W": 1})  # op -> duration


@dataclass(frozen=True)
class Instruction:
    """One instruction of a rank: compute an action, or send or receive its result.

    Attributes:
        kind: "compute", "send" or "recv".
        action: the action to compute, or the one whose result is the message.
        peer: the rank to send to or to receive from; None for "compute".
    """

    kind: str
    action: Action
    peer: int | None = None

    def __str__(self) -> str:
        """Return "0F1" to compute, ">0F1" to send the result, "<0F1" to receive it."""
        return {"compute": "", "send": ">", "recv": "<"}[self.kind] + str(self.action)


InstructionGroup = tuple[Instruction, ...]  # one action, or messages posted together


@dataclass(frozen=True)
class Program:
    """The groups of instructions that each rank carries out, one after the other.

    A group is one "compute", or one or more messages that are posted together. Messages
    from one rank to another must be received in the order of their sends, because NCCL
    has no tags. `add_messages` derives a program from a schedule.
    """

    schedule: Schedule
    ranks: tuple[tuple[InstructionGroup, ...], ...]

    def __str__(self) -> str:
        rows = ("  ".join("+".join(map(str, g)) for g in row) for row in self.ranks)
        return "\n".join(f"rank {rank} | {row}" for rank, row in enumerate(rows))


@dataclass(frozen=True)
class TimedAction:
    """An action that `rank` ran from `start` to `end`, in the unit of the costs."""

    rank: int
    action: Action
    start: Real
    end: Real


# ---- messages -----------------------------------------------------------------------


def add_messages(schedule: Schedule, *, fused: bool = True) -> Program:
    """Return what each rank computes, sends and receives to carry out `schedule`.

    With `fused`, the schedule is simulated (F, I and W take 1, B takes 2). A message is
    posted at the time when its action ends: on the sender right after the action, on
    the receiver after the action that it runs at that time. So all ranks have their
    messages in one common order, and none waits for ever, even if sends block and
    however slow some ranks are. Without `fused`, each message is posted by itself, and
    received just before it is needed; `check` finds out whether that can work.

    A result that stays on its rank is not sent. With `fused`, raises ScheduleError if
    the ranks would wait for ever. Source: PyTorch's `_add_send_recv`. Chapter 11.
    """
    if not fused:
        ranks = range(schedule.num_ranks)
        return Program(schedule, tuple(_one_by_one(schedule, rank) for rank in ranks))
    rows: list[list[tuple[Real, int, int, Instruction]]] = [[] for _ in schedule.ranks]
    events = sorted(run_in_time(schedule), key=lambda event: (event.end, event.rank))
    for number, event in enumerate(events):
        rank, action = event.rank, event.action
        rows[rank].append((event.start, 1, number, Instruction("compute", action)))
        peer = schedule.receiver(action)
        if peer is not None:
            place = event.end, 0, number  # 0 sorts before actions that start then
            rows[rank].append((*place, Instruction("send", action, peer)))
            rows[peer].append((*place, Instruction("recv", action, rank)))
    steps = ([step for *_, step in sorted(row)] for row in rows)
    return Program(schedule, tuple(map(_grouped, steps)))


def _one_by_one(schedule: Schedule, rank: int) -> tuple[InstructionGroup, ...]:
    """Return groups of one: receive just before an action, send right after it."""
    groups: list[InstructionGroup] = []
    for action in schedule.ranks[rank]:
        source, peer = schedule.source(action), schedule.receiver(action)
        home = None if source is None else schedule.homes.get(source.stage, (rank,))[0]
        if home not in (None, rank):
            groups.append((Instruction("recv", source, home),))
        groups.append((Instruction("compute", action),))
        if peer is not None:
            groups.append((Instruction("send", action, peer),))
    return tuple(groups)


def _grouped(steps: Sequence[Instruction]) -> tuple[InstructionGroup, ...]:
    """Collect all messages between two actions in one group."""
    groups: list[InstructionGroup] = []
    for step in steps:
        messages = groups and "compute" not in (step.kind, groups[-1][0].kind)
        before = groups.pop() if messages else ()
        groups.append((*before, step))
    return tuple(groups)


# ---- when each action can run --------------------------------------------------------


def run_in_time(
    schedule: Schedule,
    seconds: Callable[[Action], Real] = lambda action: UNIT_TIMES[action.op],
    send: Real = 0,
) -> tuple[TimedAction, ...]:
    """Return when each action runs if a rank waits only for the action's inputs.

    The result is sorted so that inputs come first. `seconds` returns the duration of an
    action, `send` is the time of a message. Raises ScheduleError if ranks would wait
    for ever.
    """
    rows, events = schedule.ranks, {}
    following, clock = [0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while following[rank] < len(row):
                action = row[following[rank]]
                needs = [events.get(need) for need in schedule.needs(action)]
                if None in needs:
                    break
                ends = (need.end + send * (need.rank != rank) for need in needs)
                start = max((clock[rank], *ends))
                clock[rank] = start + seconds(action)
                events[action] = TimedAction(rank, action, start, clock[rank])
                following[rank] += 1
                moved = True
    waits = {
        rank: _missing_input(schedule, rank, row[following[rank]], events)
        for rank, row in enumerate(rows)
        if following[rank] < len(row)
    }
    if waits:
        raise ScheduleError(f"{schedule.name}: {describe_circle(waits)}")
    return tuple(events.values())


def _missing_input(
    schedule: Schedule, rank: int, action: Action, events: Mapping[Action, TimedAction]
) -> tuple[str, int | None]:
    """Return a text with the input that `action` waits for, and the input's rank."""
    need = next(need for need in schedule.needs(action) if need not in events)
    rows = enumerate(schedule.ranks)
    home = next((other for other, row in rows if need in row), None)
    if home == rank:
        return f"runs {action} before {need}, which it needs", home
    of_rank = "" if home is None else f" of rank {home}"
    return f"is at {action}, which needs {need}{of_rank}", home


def describe_circle(waits: Mapping[int, tuple[str, int | None]]) -> str:
    """Return a text that explains why no rank can go on: a circle, if there is one.

    `waits[rank]` is a text with what the rank waits for, and the rank that it waits
    for, or None if no rank ever runs what it needs.
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
