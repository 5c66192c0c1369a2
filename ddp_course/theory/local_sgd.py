"""What it costs to average parameters after every H steps. Chapter 14."""

from __future__ import annotations

from fractions import Fraction

from ddp_course.theory.checks import check_count, check_world
from ddp_course.theory.collectives import bytes_sent


def local_sgd_bytes(
    world_size: int, nbytes: float, every: int, steps: int, warmup: int = 0
) -> Fraction:
    """Return the bytes that each rank sends in `steps` steps, in rings.

    In `warmup` steps at first gradients travel, then parameters, after each `every`
    steps: both are `nbytes`, so it is 1 / `every` of what data parallelism sends, and
    nothing for steps that end before the next average. Chapter 14.
    """
    check_world(world_size, nbytes)
    check_count("every", every)
    alone = max(0, steps - warmup)
    times = min(steps, warmup) + alone // every
    return times * bytes_sent("all_reduce_ring", world_size)[0] * Fraction(nbytes)
