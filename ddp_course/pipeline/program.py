"""Programs: what each rank computes, sends and receives, step by step, as plain data.

A schedule says in which order a rank computes. What it makes must reach the rank that
needs it, and for a message to pass, both must be ready for it: one in a send, the other
in a receive. When? The plain answer, a receive before the action that needs it and a
send after the action that made it, one at a time (`fused=False`), is 1F1B's undoing:

    rank 0 | 0F0  >0F0  0F1  >0F1  <1B0  0B0 ...
    rank 1 | <0F0  1F0  1B0  >1B0  <0F1  1F1 ...

Rank 0 wants to send 0F1 while rank 1 wants to send 1B0. If a send lasts until the other
rank receives it, both wait for ever. So a message is received as soon as it has been
made, even if other actions come before the one that needs it; and what a rank sends and
receives between two actions is *posted* together, as one step:

    rank 0 | 0F0  >0F0  0F1  >0F1+<1B0  0B0  0F2  >0F2+<1B1 ...
    rank 1 | <0F0  1F0  <0F1  1B0  >1B0  1F1  1B1  <0F2+>1B1 ...

Megatron-LM's send_forward_recv_backward, PyTorch's batch_isend_irecv. Chapter 11.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real

from ddp_course.pipeline.play import play
from ddp_course.pipeline.schedule import Action, Schedule


@dataclass(frozen=True)
class Step:
    """One thing that a rank does: compute an action, or send or receive its result.

    Attributes:
        kind: "compute", "send" or "recv".
        action: what is computed, or what has made the message.
        peer: the rank to send to or to receive from; None for "compute".
    """

    kind: str
    action: Action
    peer: int | None = None

    @property
    def what(self) -> str | None:
        """Of a message: "activation" or "gradient"; None for "compute"."""
        if self.kind == "compute":
            return None
        return "activation" if self.action.op == "F" else "gradient"

    @property
    def stage(self) -> int:
        """The stage that computes, or that has made the message."""
        return self.action.stage

    @property
    def microbatch(self) -> int:
        """The microbatch that it is about."""
        return self.action.microbatch

    def __str__(self) -> str:
        """Return 0F1, or with >0F1 that its result is sent, with <0F1 received."""
        return {"compute": "", "send": ">", "recv": "<"}[self.kind] + str(self.action)


Group = tuple[Step, ...]  # one action, or messages that are posted together


@dataclass(frozen=True)
class Program:
    """For each rank the groups of steps that it carries out, one after the other.

    A group is one "compute", or one or more messages that are posted together. Of two
    messages from one rank to another the first sent must be the first received: NCCL
    knows no tags.
    """

    schedule: Schedule
    ranks: tuple[tuple[Group, ...], ...]

    def messages(self, src: int, dst: int) -> tuple[Action, ...]:
        """Return what `src` sends to `dst`, in this order."""
        return tuple(
            step.action
            for group in self.ranks[src]
            for step in group
            if step.kind == "send" and step.peer == dst
        )

    def __str__(self) -> str:
        """A row of text for each rank."""
        rows = ("  ".join("+".join(map(str, g)) for g in row) for row in self.ranks)
        return "\n".join(f"rank {rank} | {row}" for rank, row in enumerate(rows))


def program(schedule: Schedule, *, fused: bool = True) -> Program:
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
    if not fused:
        every = range(schedule.num_ranks)
        return Program(schedule, tuple(_one_by_one(schedule, r) for r in every))
    rows: list[list[tuple[Real, int, int, Step]]] = [[] for _ in schedule.ranks]
    events = sorted(play(schedule), key=lambda event: (event.end, event.rank))
    for number, event in enumerate(events):
        rank, action = event.rank, event.action
        rows[rank].append((event.start, 1, number, Step("compute", action)))
        peer = receiver(schedule, rank, action)
        if peer is not None:  # at the same time, messages come before actions
            made = event.end, 0, number
            rows[rank].append((*made, Step("send", action, peer)))
            rows[peer].append((*made, Step("recv", action, rank)))
    return Program(schedule, tuple(_grouped(sorted(row, key=_when)) for row in rows))


def receiver(schedule: Schedule, rank: int, action: Action) -> int | None:
    """Return the rank to which `rank` sends the result of `action`, or None."""
    stage = action.made_for
    if stage is None or not 0 <= stage < schedule.num_stages:
        return None
    peer = schedule.rank_of(stage)
    return peer if peer != rank else None


# ---- how ----------------------------------------------------------------------------


def _one_by_one(schedule: Schedule, rank: int) -> tuple[Group, ...]:
    """Receive just before an action, send right after it, one message at a time."""
    groups: list[Group] = []
    for action in schedule.ranks[rank]:
        for need in schedule.needs(action):
            home = schedule.rank_of(need.stage)
            if home != rank:
                groups.append((Step("recv", need, home),))
        groups.append((Step("compute", action),))
        peer = receiver(schedule, rank, action)
        if peer is not None:
            groups.append((Step("send", action, peer),))
    return tuple(groups)


def _when(item: tuple[Real, int, int, Step]) -> tuple[Real, int, int]:
    return item[:3]


def _grouped(items: Iterable[tuple[Real, int, int, Step]]) -> tuple[Group, ...]:
    """Put all messages between two actions into one group."""
    groups: list[Group] = []
    for *_, step in items:
        if step.kind != "compute" and groups and groups[-1][0].kind != "compute":
            groups[-1] += (step,)
        else:
            groups.append((step,))
    return tuple(groups)
