"""Figures of buckets as they were measured: when each was sent, how large is best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ddp_course.chapters.ch05_ddp_internals.timeline import bucket_numbers
from ddp_course.lab.draw.per_rank import communicates
from ddp_course.lab.draw.plots import GRID, MIB, style
from ddp_course.lab.palette import (
    INK,
    MUTED,
    darker,
    rank_color,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MS = 1e3
DASHES = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 3))}


def plot_buckets(plan: Sequence[Any], events: Iterable[Any], rank: int = 0) -> Figure:
    """Draw when each bucket of one rank was ready, on its way, and there; time in ms.

    `plan` is that of `bucket_plan`, `events` are those of one backward pass. A dot: its
    last gradient is ready; hatched: its all-reduce. Raises ValueError unless the events
    tell of each bucket exactly once. Chapter 05.
    """
    import matplotlib
    from matplotlib import pyplot

    mine = sorted((e for e in events if e.rank == rank), key=lambda e: e.start)
    ready, sent = bucket_times(plan, mine, rank)
    first = min(e.start for e in mine)
    over = next((e.start for e in mine if e.lane == "wait"), max(ready.values()))
    with matplotlib.rc_context():
        style()
        matplotlib.rcParams["hatch.linewidth"] = 1.0
        size = (8.5, 1.4 + 0.34 * max(3, len(plan)))
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        for k in range(len(plan)):
            times = [(t - first) * MS for t in (ready[k], *sent[k])]
            _draw_bucket(axes, k, *times, rank_color(rank))
        axes.axvline((over - first) * MS, label="backward ends", **DASHES)
        names = [f"bucket {b.index}, {b.nbytes / MIB:.2f} MiB" for b in plan]
        axes.set_yticks(range(len(plan)), names)
        axes.set_ylim(len(plan) - 0.5, -0.5)
        axes.set_xlim(0, 1.02 * max((end - first) * MS for _, end in sent.values()))
        axes.set_xlabel("time since the beginning of backward [ms]")
        axes.tick_params(axis="y", length=0)
        axes.set_title(f"rank {rank}", loc="right", fontsize=11)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    pyplot.close(figure)
    return figure


def _draw_bucket(
    axes: Axes, k: int, ready: float, start: float, end: float, color: str
) -> None:
    """Draw a bucket's line: a dot, dots while it waits, a hatched bar."""
    names = ("ready", "waits", "all-reduce") if k == 0 else ("_", "_", "_")
    axes.plot([ready], [k], "o", color=color, mec=INK, zorder=4, label=names[0])
    look = {"color": MUTED, "linewidth": 1.4, "linestyle": ":", "label": names[1]}
    axes.plot([ready, max(ready, start)], [k, k], **look)
    look = {"color": "white", "ec": darker(color, 0.3), "hatch": "////"}
    axes.barh([k], [end - start], left=start, height=0.62, label=names[2], **look)


def bucket_times(
    plan: Sequence[Any], mine: Sequence[Any], rank: int
) -> tuple[dict[int, float], dict[int, tuple[float, float]]]:
    """Return when each bucket was ready, and when it was sent and done, in seconds."""
    numbers = bucket_numbers(mine)
    ready: dict[int, float] = {}
    sent: dict[int, tuple[float, float]] = {}
    for event in mine:
        k = numbers.get(id(event))
        if k is None or event.lane == "launch":
            continue
        if k in (sent if communicates(event) else ready):
            raise ValueError(
                f"rank {rank} tells of bucket {k} twice; give the events of one step"
            )
        if communicates(event):
            sent[k] = event.start, event.end
        else:
            ready[k] = event.end
    want = set(range(len(plan)))
    if not want or set(ready) != want or set(sent) != want:
        raise ValueError(
            f"the plan has {len(plan)} buckets; rank {rank} tells of {sorted(ready)} "
            f"being ready and of {sorted(sent)} being sent"
        )
    return ready, sent


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
