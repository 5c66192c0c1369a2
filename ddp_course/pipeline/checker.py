"""Is a schedule legal? `check` proves it, or says what is wrong first.

A schedule is legal if

1. it is complete: on each stage each microbatch has one F and either one B or one I and
   one W, and each stage is on one rank (DualPipe keeps each on two: it has no place in
   this notation);
2. every rank can come to the end of its row, each action after those that it needs;
3. no ranks wait for each other for ever when they send and receive, even if a send
   lasts until the message is received;
4. no rank keeps more activations than it has memory for, if a limit is given.

1 and 4 are counted, 2 and 3 are played through once (`player.play`): once is a proof.
Chapter 11.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from numbers import Real

from ddp_course.pipeline.player import play
from ddp_course.pipeline.program import Program, add_messages
from ddp_course.pipeline.schedule import (
    Action,
    Schedule,
    ScheduleError,
    check_complete,
)


@dataclass(frozen=True)
class Proof:
    """A schedule is legal: here is a way through it.

    Attributes:
        program: what each rank computes, sends and receives.
        blocking: whether it is proved with sends that block.
        order: all actions as (rank, action), each after all that it needs: carried out
            one by one in this order, nobody ever waits.
        peak_activations: per rank, in microbatches.
    """

    program: Program
    blocking: bool
    order: tuple[tuple[int, Action], ...]
    peak_activations: tuple[Fraction, ...]

    def __str__(self) -> str:
        schedule = self.program.schedule
        peaks = ", ".join(map(str, self.peak_activations))
        sends = "blocking" if self.blocking else "buffered"
        return (
            f"{schedule.name} is legal with {sends} sends; activations of {peaks} "
            f"microbatches at most on ranks 0 to {schedule.num_ranks - 1}; one by one: "
            + " ".join(str(action) for _, action in self.order)
        )


def check(
    schedule: Schedule,
    *,
    blocking: bool = True,
    fused: bool = True,
    max_activations: Real | Sequence[Real] | None = None,
) -> Proof:
    """Return the proof that `schedule` is legal.

    Args:
        schedule: any.
        blocking: a send lasts until it is received, as the strictest backend may have
            it. False: nobody waits for a send, and messages are told apart by what they
            are, so that point 3 is always given.
        fused: whether messages between two actions are posted together (`program`).
        max_activations: the most microbatches whose activations a rank may keep; one
            limit for all, or one for each rank.

    Raises:
        ScheduleError: names the first thing that is wrong, in the order of this
            module's text.
        ValueError: for limits that are not one for each rank.

    Chapter 11.
    """
    check_complete(schedule)
    steps = add_messages(schedule, fused=fused)
    events = play(steps)
    if blocking:
        events = play(steps, blocking=True)
    for wrong in _too_much(schedule, max_activations):
        raise ScheduleError(f"{schedule.name}: {wrong}")
    order = tuple((event.rank, event.action) for event in events)
    return Proof(steps, blocking, order, peak_activations(schedule))


def activations(schedule: Schedule, rank: int) -> list[Fraction]:
    """Return how many microbatches' activations `rank` keeps after each of its actions.

    F adds what its stage keeps, 1 / the number of the rank's stages; B takes it away,
    or W: until then the weights' gradients need it.
    """
    change = {"F": 1, "B": -1, "I": 0, "W": -1}
    row, stages = schedule.ranks[rank], len(schedule.stages_of(rank))
    return list(accumulate(Fraction(change[action.op], stages) for action in row))


def peak_activations(schedule: Schedule) -> tuple[Fraction, ...]:
    """Return for each rank the most that it keeps at a time, see `activations`."""
    kept = (activations(schedule, rank) for rank in range(schedule.num_ranks))
    return tuple(max(of_rank, default=Fraction(0)) for of_rank in kept)


def _too_much(
    schedule: Schedule, limits: Real | Sequence[Real] | None
) -> Iterator[str]:
    """Say which rank keeps more than its limit, and from which action on."""
    if limits is None:
        return
    if not isinstance(limits, Sequence):
        limits = [limits] * schedule.num_ranks
    if len(limits) != (n := schedule.num_ranks):
        told = f"max_activations has {len(limits)} limits"
        raise ValueError(f"{told}; there are {n} ranks")
    for rank, limit in enumerate(limits):
        kept = activations(schedule, rank)
        for action, now in zip(schedule.ranks[rank], kept, strict=True):
            if now > limit:
                much = f"the activations of {now} microbatches after {action}"
                yield f"rank {rank} keeps {much}; its limit is {limit}"
