"""How many seconds to work between two checkpoints, if failures come at random.

All times are in seconds: `work` is the time of work between two saves, `save` the time
for which a save stops the work, `restart` the time from a failure until work goes on,
and `mean`, or M, the mean time between two failures of the job. A failure loses all
work since the last complete save. Failures are independent, at a constant rate, and may
also come during a save or a restart. Chapter 19.
"""

from __future__ import annotations

import math
from random import Random


def young(save: float, mean: float) -> float:
    """Return the best seconds of work between saves, if `save` is far below `mean`.

    The result minimises save / work + work / (2 * mean): the cost of saves, and the
    half interval that a failure loses on average. Raises ValueError unless `save` is 0
    or more and `mean` above 0. Young, 1974.
    """
    if not (save >= 0 and mean > 0):
        raise ValueError(
            f"save is {save} and mean {mean}; save must be 0 or more, mean above 0"
        )
    return math.sqrt(2 * save * mean)


def daly(save: float, mean: float) -> float:
    """Return nearly the best seconds of work between saves, also for slow saves.

    The first terms of a series for the minimum of `expected_time`. Raises ValueError
    for the same values as `young`. Daly, 2006.
    """
    simple = young(save, mean)
    if save >= 2 * mean:
        return mean
    ratio = save / (2 * mean)
    return simple * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def expected_time(work: float, save: float, mean: float, restart: float = 0.0) -> float:
    """Return the expected seconds that pass for each second of work that is kept.

    An interval lasts until `work + save` seconds pass without a failure. `restart`
    multiplies the result, so the best `work` does not depend on it. Daly, 2006.
    """
    segment = mean * math.exp(restart / mean) * math.expm1((work + save) / mean)
    return segment / work


def simulated_time(
    work: float,
    save: float,
    mean: float,
    restart: float = 0.0,
    intervals: int = 10_000,
    *,
    dice: Random,
) -> float:
    """Simulate many intervals; return the seconds per second of work that was kept.

    The time to the next failure is drawn from `dice` anew for each interval: an
    exponential distribution does not depend on the time since the last failure.
    """
    clock = 0.0
    for _ in range(intervals):
        needed = work + save
        while (failure := dice.expovariate(1 / mean)) < needed:
            clock += failure
            needed = restart + work + save
        clock += needed
    return clock / (intervals * work)
