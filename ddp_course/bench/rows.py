"""What a bench returns, and how two things are measured fairly.

Machines are noisy: another program can take half of the cores for a minute. So ours
and theirs are measured in turns, A B, B A, A B, ... within one run, and medians are
taken: a busy minute hits both, and neither always comes first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TypedDict

from rich import box
from rich.table import Table


class Row(TypedDict):
    """One case of a bench. `ratio` is ours / theirs: below 1 is better for times.

    A bench may add what else a figure wants to know, such as a size.
    """

    bench: str
    case: str
    metric: str  # the unit of `ours` and `theirs`: "seconds", "bytes"
    ours: float
    theirs: float
    ratio: float


def row(
    bench: str, case: str, metric: str, ours: float, theirs: float, **more: float | str
) -> Row:
    """Return a row; its ratio follows from the rest."""
    return Row(
        bench=bench,
        case=case,
        metric=metric,
        ours=ours,
        theirs=theirs,
        ratio=ours / theirs,
        **more,
    )


def interleaved(
    ours: Callable[[], float], theirs: Callable[[], float], repetitions: int
) -> tuple[float, float]:
    """Measure both in turns and return the median of each.

    `ours` and `theirs` do the thing once and return what was measured.
    """
    results: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions):
        for side in ((0, 1), (1, 0))[repetition % 2]:
            results[side].append((ours, theirs)[side]())
    return statistics.median(results[0]), statistics.median(results[1])


def table(rows: list[Row]) -> Table:
    """Return a table of `rows` to print; the last column is above 1 if ours is better.

    It is theirs / ours for seconds and bytes, and ours / theirs for bytes per second.
    """
    shown = Table("case", "metric", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for title in ("ours", "theirs", "ratio", "speed-up"):
        shown.add_column(title, justify="right", no_wrap=True)
    for r in rows:
        numbers = (f"{r[key]:.3g}" for key in ("ours", "theirs", "ratio"))
        better = r["ratio"] if r["metric"] == "bytes/s" else r["theirs"] / r["ours"]
        speed_up = f"{better:.2f} x" if better < 10 else f"{better:.1f} x"
        shown.add_row(r["case"], r["metric"], *numbers, speed_up)
    return shown
