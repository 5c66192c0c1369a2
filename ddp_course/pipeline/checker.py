"""Check whether a schedule is legal: `check` returns a proof, or raises an error.

A schedule is legal if

1. it is complete: on each stage each microbatch has one F and either one B or one I and
   one W, and each stage is on one rank (DualPipe puts each stage on two ranks, so this
   notation cannot express it);
2. every rank can finish its row, with each action after the actions that it needs;
3. the ranks' sends and receives never deadlock, even if each send blocks until the
   message is received;
4. no rank stores more activations than its limit, if there is one.

Counting decides 1 and 4. A run without messages decides 2 (`program.run_in_time`), and
one in which sends block decides 3 (`player.play`): every run has the same outcome.
Chapter 11.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from numbers import Real

from ddp_course.pipeline.player import play
from ddp_course.pipeline.program import Program, add_messages, run_in_time
from ddp_course.pipeline.schedule import (
    Action,
    Schedule,
    ScheduleError,
    check_complete,
)


@dataclass(frozen=True)
class Proof:
    """A proof that a schedule is legal: an order in which its actions can run.

    Attributes:
        program: what each rank computes, sends and receives.
        order: all actions as (rank, action), each after all actions that it needs.
        peak_activations: the most that each rank stores, in microbatches.
    """

    program: Program
    order: tuple[tuple[int, Action], ...]
    peak_activations: tuple[Fraction, ...]

    def __str__(self) -> str:
        schedule = self.program.schedule
        peaks = ", ".join(map(str, self.peak_activations))
        return (
            f"{schedule.name} is legal, even if sends block; activations of {peaks} "
            f"microbatches at most on ranks 0 to {schedule.num_ranks - 1}; one by one: "
            + " ".join(str(action) for _, action in self.order)
        )


def check(
    schedule: Schedule,
    *,
    fused: bool = True,
    max_activations: Real | Sequence[Real] | None = None,
) -> Proof:
    """Return the proof that `schedule` is legal.

    Args:
        schedule: the schedule to check.
        fused: whether messages between two actions are posted together (`program`).
        max_activations: the most microbatches whose activations a rank may store; one
            limit for all, or one for each rank.

    Raises:
        ScheduleError: names the first condition that fails, in the order of this
            module's text.
        ValueError: the number of limits is not the number of ranks.

    Chapter 11.
    """
    check_complete(schedule)
    order = tuple((event.rank, event.action) for event in run_in_time(schedule))
    steps = add_messages(schedule, fused=fused)
    play(steps)
    for problem in _memory_problems(schedule, max_activations):
        raise ScheduleError(f"{schedule.name}: {problem}")
    return Proof(steps, order, peak_activations(schedule))


def activations(schedule: Schedule, rank: int) -> list[Fraction]:
    """Return how many microbatches' activations `rank` stores after each action.

    F adds 1 / (number of the rank's stages). B subtracts it, or W if backward is split:
    the weights' gradients need the activations until then.
    """
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    row, stages = schedule.ranks[rank], len(schedule.stages_of(rank))
    return list(accumulate(Fraction(change[action.op], stages) for action in row))


def peak_activations(schedule: Schedule) -> tuple[Fraction, ...]:
    """Return for each rank the maximum of its `activations`."""
    counts = (activations(schedule, rank) for rank in range(schedule.num_ranks))
    return tuple(max(count, default=Fraction(0)) for count in counts)


def _memory_problems(
    schedule: Schedule, limits: Real | Sequence[Real] | None
) -> Iterator[str]:
    """Yield a message for each action after which a rank exceeds its limit."""
    if limits is None:
        return
    if not isinstance(limits, Sequence):
        limits = [limits] * schedule.num_ranks
    if len(limits) != (n := schedule.num_ranks):
        raise ValueError(
            f"max_activations has {len(limits)} limits; there are {n} ranks"
        )
    for rank, limit in enumerate(limits):
        counts = activations(schedule, rank)
        for action, count in zip(schedule.ranks[rank], counts, strict=True):
            if count > limit:
                much = f"the activations of {count} microbatches after {action}"
                yield f"rank {rank} keeps {much}; its limit is {limit}"
