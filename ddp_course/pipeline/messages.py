"""Which messages a schedule takes, and when they are posted.

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

Megatron-LM's send_forward_recv_backward, PyTorch's batch_isend_irecv. Chapter 11.
"""

from __future__ import annotations

from itertools import groupby
from numbers import Real

from ddp_course.pipeline.program import Group, Instruction, Program, play
from ddp_course.pipeline.schedule import Schedule


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
    return Program(schedule, tuple(_grouped(sorted(row, key=_when)) for row in rows))


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


def _when(item: tuple[Real, int, int, Instruction]) -> tuple[Real, int, int]:
    return item[:3]


def _grouped(items: list[tuple[Real, int, int, Instruction]]) -> tuple[Group, ...]:
    """Put all messages between two actions into one group."""
    together = groupby(items, key=lambda item: item[3].kind == "compute")
    groups: list[Group] = []
    for computes, members in together:
        steps = tuple(item[3] for item in members)
        groups += [(step,) for step in steps] if computes else [steps]
    return tuple(groups)
