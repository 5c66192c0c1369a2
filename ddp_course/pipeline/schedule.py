"""Schedules: the order of each rank's actions, as plain data.

A pipeline is planned before anything is computed. The model is cut into *stages*, the
batch into *microbatches*, and an *action* is one of four computations of a stage with a
microbatch:

    F  forward: from the stage's input to its output
    B  backward: from the output's gradient to the input's and the weights' gradients
    I  the half of B that the previous stage waits for: the gradient of the input
    W  the half of B that no stage waits for: the gradients of the weights

A *schedule* is a row of actions for each rank. It has no times: a rank runs the next
action of its row as soon as the action's inputs have arrived. Two ranks, two
microbatches, first all forwards and then all backwards:

    gpipe: 2 stages on 2 ranks, 2 microbatches
    rank 0 | 0F0 0F1 0B0 0B1
    rank 1 | 1F0 1F1 1B0 1B1

Schedules can be printed, drawn, checked (`checker`) and run in virtual time
(`simulate`) without any process; `runtime` carries them out on ranks. This file has
those with stage r on rank r. They follow one rule, `at_most`: go forward while fewer
microbatches are in flight than a limit, else go backward. A microbatch is *in flight*
on a stage from its forward to its backward: during this time its activations take
memory. With p ranks and m microbatches, m at least p,

    schedule     limit on rank r    bubble / whole time    activations kept
    naive        1                  (p-1)/p                1
    gpipe        m                  (p-1)/(m+p-1)          m
    one_f_one_b  p-r                (p-1)/(m+p-1)          min(m, p-r)

The notation is that of PyTorch's torch/distributed/pipelining/schedules.py; `schedules`
has more schedules. Chapters 10 and 11.
"""

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Self

OPS = ("F", "B", "I", "W")


class ScheduleError(ValueError):
    """An error: the schedule cannot be run. The text names the first problem."""


@dataclass(frozen=True)
class Action:
    """One computation of one stage: "2F0" is stage 2, forward, microbatch 0.

    Attributes:
        op: "F", "B", "I" or "W".
        stage: number of the stage; 0 has the model's input, the last one the loss.
        microbatch: number of the microbatch, counted from 0.

    Raises ValueError for another op, and for a stage or a microbatch below 0.
    """

    op: str
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if self.op not in OPS:
            known = ", ".join(map(repr, OPS))
            raise ValueError(f"op is {self.op!r}; it can be {known}")
        for name in ("stage", "microbatch"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                must = "it must be an integer, 0 or more"
                raise ValueError(f"{name} is {value!r}; {must}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the action of the text, such as "2F0"; raise ValueError if invalid."""
        match = re.fullmatch(r"(\d+)([FBIW])(\d+)", text)
        if not match:
            raise ValueError(
                f"{text!r} is no action; it must be stage, op and microbatch, as in "
                f"'2F0', with one of the ops {', '.join(OPS)}"
            )
        stage, op, microbatch = match.groups()
        return cls(op, int(stage), int(microbatch))

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"


@dataclass(frozen=True)
class Schedule:
    """All actions of one training step; `check` finds out whether it is legal.

    Attributes:
        name: the name that tables and drawings show.
        num_stages: stages of the model, on all ranks together.
        num_microbatches: parts of the batch.
        ranks: each rank's actions, in the order in which the rank runs them.

    Raises ValueError for fewer than one stage, microbatch or rank.
    """

    name: str
    num_stages: int
    num_microbatches: int
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        """Check the numbers, and convert lists to tuples."""
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        names = "num_stages", "num_microbatches", "num_ranks"
        check_counts(**{name: getattr(self, name) for name in names})

    @property
    def num_ranks(self) -> int:
        """Ranks that share the model."""
        return len(self.ranks)

    @cached_property
    def homes(self) -> Mapping[int, tuple[int, ...]]:
        """The ranks of each stage: one, if the schedule is legal."""
        homes: dict[int, tuple[int, ...]] = {}
        for rank, row in enumerate(self.ranks):
            for stage in {action.stage for action in row}:
                homes[stage] = (*homes.get(stage, ()), rank)
        return homes

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on `rank`, smallest first."""
        return tuple(sorted({action.stage for action in self.ranks[rank]}))

    def rank_of(self, stage: int) -> int:
        """Return the rank that has `stage`; raise ValueError if no rank has it."""
        if stage not in self.homes:
            raise ValueError(
                f"stage {stage} is on no rank; stages are 0 to {self.num_stages - 1}"
            )
        return self.homes[stage][0]

    @property
    def ranks_of_stages(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return tuple(map(self.rank_of, range(self.num_stages)))

    def source(self, action: Action) -> Action | None:
        """Return the action of another stage whose result `action` needs, or None.

        F needs the activation of the previous stage, B and I the gradient of the next
        stage. None: it needs the batch, the loss, or the I of its own stage.
        """
        stage, microbatch = action.stage, action.microbatch
        if action.op == "F":
            return Action("F", stage - 1, microbatch) if stage else None
        if action.op == "W" or stage == self.num_stages - 1:
            return None
        half = Action("I", stage + 1, microbatch)
        return half if half in self._splits else Action("B", stage + 1, microbatch)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions that must end before `action` can begin.

        These are its `source`, and on its own stage F before B or I, and I before W.
        """
        op = {"B": "F", "I": "F", "W": "I"}.get(action.op)
        own = (Action(op, action.stage, action.microbatch),) if op else ()
        source = self.source(action)
        return own if source is None else (*own, source)

    def receiver(self, action: Action) -> int | None:
        """Return the rank to which the result of `action` is sent, or None."""
        stage = {"F": action.stage + 1, "W": -1}.get(action.op, action.stage - 1)
        if stage not in self.homes or stage == self.num_stages:
            return None
        peer, own = self.rank_of(stage), self.rank_of(action.stage)
        return peer if peer != own else None

    def messages(self, src: int, dst: int) -> tuple[Action, ...]:
        """Return the actions of rank `src` whose results rank `dst` needs, in order."""
        return tuple(a for a in self.ranks[src] if self.receiver(a) == dst)

    @cached_property
    def _splits(self) -> frozenset[Action]:
        return frozenset(a for row in self.ranks for a in row if a.op == "I")

    def __str__(self) -> str:
        head = f"{self.name}: {self.num_stages} stages on {self.num_ranks} ranks, "
        head += f"{self.num_microbatches} microbatches"
        width = max((len(str(a)) for row in self.ranks for a in row), default=0)
        rows = (" ".join(str(a).ljust(width) for a in row) for row in self.ranks)
        lines = (f"rank {rank} | {row}".rstrip() for rank, row in enumerate(rows))
        return "\n".join([head, *lines])


def check_counts(**counts: int) -> None:
    """Raise ValueError unless each count is an integer of 1 or more."""
    for name, value in counts.items():
        if not isinstance(value, Integral) or value < 1:
            must = "it must be an integer of 1 or more"
            raise ValueError(f"{name} is {value!r}; {must}")


# ---- one stage on each rank ----------------------------------------------------------


def at_most(
    limit: int, forwards: Sequence[Action], backwards: Sequence[Action]
) -> list[Action]:
    """Return a row: forwards first, with at most `limit` microbatches in flight."""
    row: list[Action] = []
    b = 0  # number of backwards in the row
    while b < len(backwards):
        f = len(row) - b  # number of forwards
        if f < len(forwards) and f - b < limit:
            row.append(forwards[f])
        else:
            row.append(backwards[b])
            b += 1
    return row


def naive(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule in which one stage computes and all others wait.

    A microbatch goes forward through all stages and back again before the next one
    begins. The bubble is (p-1)/p for any number of microbatches; a rank stores the
    activations of one microbatch. A model with `.to(device)` between its layers runs in
    this order: "naive model parallelism". Raises ValueError for fewer than one rank or
    microbatch. Chapter 10.
    """
    return one_stage_per_rank("naive", num_ranks, num_microbatches, lambda rank: 1)


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule with all forwards first, then all backwards.

    The bubble is (p-1)/(m+p-1); a rank stores the activations of all m microbatches.
    Raises ValueError for fewer than one rank or microbatch. Source: Huang et al. 2019,
    "GPipe", arXiv:1811.06965, section 2.3, which also recomputes the activations;
    PyTorch's ScheduleGPipe. Chapter 10.
    """
    return one_stage_per_rank(
        "gpipe", num_ranks, num_microbatches, lambda rank: num_microbatches
    )


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the schedule that goes backward as soon as it can: 1F1B.

    While rank r's first microbatch goes to the last rank and back, rank r can compute
    p-1-r others: p-r in flight keep the rank busy, and more would only take memory.
    After this warm-up each backward frees the memory for one forward. The bubble is
    GPipe's, (p-1)/(m+p-1); the activations are those of min(m, p-r) microbatches.
    Raises ValueError for fewer than one rank or microbatch. Source: Narayanan et al.
    2021, "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush),
    arXiv:2006.09503, section 3.2; PyTorch's Schedule1F1B. Chapter 11.
    """
    return one_stage_per_rank(
        "1f1b", num_ranks, num_microbatches, lambda rank: num_ranks - rank
    )


def one_stage_per_rank(
    name: str, p: int, m: int, limit: Callable[[int], int]
) -> Schedule:
    """Build a schedule with stage r on rank r and `limit(r)` microbatches in flight."""
    check_counts(num_ranks=p, num_microbatches=m)
    rows = []
    for rank in range(p):
        forwards, backwards = ([Action(op, rank, k) for k in range(m)] for op in "FB")
        rows.append(at_most(limit(rank), forwards, backwards))
    return Schedule(name, p, m, rows)


# name -> function; `schedules` adds more
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


# ---- completeness --------------------------------------------------------------------


def check_complete(schedule: Schedule) -> None:
    """Raise ScheduleError unless each action occurs once, and each stage on one rank.

    Each stage has, for each microbatch, one F and either one B, or one I and one W.
    """
    for problem in _incomplete(schedule):
        raise ScheduleError(f"{schedule.name}: {problem}")


def _incomplete(schedule: Schedule) -> Iterator[str]:
    """Yield a message for each action that is missing, repeated, or out of range."""
    first: dict[Action, int] = {}
    stages, microbatches = schedule.num_stages, schedule.num_microbatches
    for rank, row in enumerate(schedule.ranks):
        for action in row:
            if action.stage >= stages:
                yield f"rank {rank} runs {action}; the last stage is {stages - 1}"
            if action.microbatch >= microbatches:
                last = microbatches - 1
                yield f"rank {rank} runs {action}; the last microbatch is {last}"
            if action in first:
                yield f"{action} is run twice, by ranks {first[action]} and {rank}"
            first[action] = rank
    for stage in range(stages):
        ranks = schedule.homes.get(stage, ())
        if len(ranks) != 1:
            names = " and ".join(f"rank {rank}" for rank in ranks) or "no rank"
            why = " (so DualPipe cannot be written here)" if ranks else ""
            yield f"stage {stage} is on {names}; it must be on one{why}"
        for microbatch in range(microbatches):
            yield from _not_once(first, stage, microbatch)


def _not_once(run: Container[Action], stage: int, microbatch: int) -> Iterator[str]:
    """Yield a message for each action that a microbatch lacks, or has twice."""
    f, b, i, w = (Action(op, stage, microbatch) for op in OPS)
    if f not in run:
        yield f"{f} is missing"
    halves = [half for half in (i, w) if half in run]
    if b in run and halves:
        yield f"{b} is run, and {halves[0]}, which is a part of it"
    if b not in run and len(halves) == 1:
        yield f"{w if halves == [i] else i} is missing: {halves[0]} is only half of {b}"
    if b not in run and not halves:
        yield f"{b} is missing, or {i} and {w} in its place"
