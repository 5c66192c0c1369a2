"""Time that training loses to saves and failures, at several checkpoint intervals.

Ranks are killed at random times and continue from their last checkpoint, see
`bench.killed`. Restarts do not count: they cost the same at any interval. Chapter 19.
"""

from __future__ import annotations

from collections.abc import Iterator

from ddp_course.bench.killed import MEAN, SAVE, killed_runs
from ddp_course.bench.turns import Pair, Row, row
from ddp_course.failures.interval import daly, expected_time

ABOUT = "Time lost at the predicted checkpoint interval, and at the best one found."
PREDICTED, BEST = "predicted interval", "best interval found by running"
MEASURED, EXPECTED = "measured", "expected"
PAIRS = (
    Pair(PREDICTED, BEST, 1.1),
    Pair(MEASURED, EXPECTED, title="lost seconds over the formula's"),
)
FACTORS = (1.0, 0.25, 0.5, 0.71, 1.41, 2.0, 4.0)  # times the predicted interval


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each interval, and one of the predicted beside the best one."""
    failures = 4 if quick else 40
    predicted = daly(SAVE, MEAN)
    factors = FACTORS[:3] if quick else FACTORS
    runs = killed_runs([factor * predicted for factor in factors], failures)
    lost = [run.time - 1 for run in runs.values()]
    for factor, interval, seconds in zip(factors, runs, lost, strict=True):
        case = f"{factor:g} x the predicted interval"
        expected = expected_time(interval, SAVE, MEAN) - 1
        yield row(case, PAIRS[1], "seconds", seconds, expected)
    case = f"{failures} failures at each of {len(lost)} intervals"
    yield row(case, PAIRS[0], "seconds", lost[0], min(lost))
