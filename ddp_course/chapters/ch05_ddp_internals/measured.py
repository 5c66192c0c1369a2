"""A figure of buckets as they were measured: how large is best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ddp_course.lab.draw.plots import GRID, style
from ddp_course.lab.palette import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MS = 1e3


def plot_bucket_sweep(
    rows: Iterable[Sequence[float]],
    bound: float | None = None,
    *,
    ylabel: str = "time of a step [ms]",
) -> Figure:
    """Draw the time of a step in ms against the size of a bucket in MiB.

    A row is (cap in MiB, number of buckets, seconds) or has the seconds that theory
    predicts as a fourth number. `bound` are the seconds without communication, drawn
    as a line; the fastest size is marked. Raises ValueError for no rows, and for what
    is not above 0. Chapter 05.
    """
    import matplotlib
    from matplotlib import pyplot

    rows = sorted(tuple(map(float, row)) for row in rows)
    _check_rows(rows, bound)
    caps = [row[0] for row in rows]
    ms = [row[2] * MS for row in rows]
    best = min(range(len(ms)), key=lambda k: ms[k])
    with matplotlib.rc_context():
        style()
        figure, axes = pyplot.subplots(figsize=(8.5, 3.4), layout="constrained")
        axes.plot(caps, ms, "o-", color=INK, linewidth=1.8, label="measured", zorder=3)
        if all(len(row) == 4 for row in rows):
            look = {"color": MUTED, "markerfacecolor": "white", "linewidth": 1.4}
            axes.plot(
                caps, [row[3] * MS for row in rows], "s--", label="theory", **look
            )
        look = {"markersize": 14, "mec": INK, "markerfacecolor": "none"}
        name = f"fastest: {caps[best]:g} MiB, {ms[best]:.0f} ms"
        axes.plot([caps[best]], [ms[best]], "o", label=name, **look)
        if bound is not None:
            look = {"color": INK, "linewidth": 1.2, "linestyle": (0, (1, 2))}
            axes.axhline(bound * MS, label="without communication", **look)
        _bucket_axis(axes, rows)
        axes.set_ylabel(ylabel)
        axes.set_ylim(0, 1.1 * max(v * MS for row in rows for v in row[2:]))
        axes.grid(axis="y", **GRID)
        axes.set_axisbelow(True)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    pyplot.close(figure)
    return figure


def _bucket_axis(axes: Axes, rows: Sequence[tuple[float, ...]]) -> None:
    """Make x logarithmic, with a mark for each size and its number of buckets."""
    from matplotlib.ticker import FixedFormatter, FixedLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([row[0] for row in rows]))
    names = [f"{cap:g}\n({n:g})" for cap, n, *_ in rows]
    axes.xaxis.set_major_formatter(FixedFormatter(names))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    axes.set_xlabel("a bucket is closed at [MiB] (number of buckets)")


def _check_rows(rows: Sequence[tuple[float, ...]], bound: float | None) -> None:
    if not rows:
        raise ValueError("there are no rows; at least one must be drawn")
    for row in rows:
        if len(row) not in (3, 4):
            raise ValueError(
                f"a row is {row}; it must be (MiB, number of buckets, seconds) or "
                "these and the seconds predicted"
            )
    for value in [v for row in rows for v in row] + [1.0 if bound is None else bound]:
        if not 0 < value < math.inf:
            raise ValueError(f"a number is {value}; it must be above 0 and finite")
