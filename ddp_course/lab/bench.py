"""Figures of what a bench measured, drawn from its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ddp_course.lab.bench_pp import pp
from ddp_course.lab.bench_tp import tp
from ddp_course.lab.bench_zero import zero
from ddp_course.lab.draw.plots import style
from ddp_course.lab.draw.sizes import plot_sizes
from ddp_course.lab.palette import INK, MUTED
from ddp_course.theory import bus_factor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOT_DRAWN = ("reduce_scatter", "all_gather", "chosen", "again", "gloo, patient")


def all_reduce(rows: Iterable[Mapping[str, Any]], ranks: int | None = None) -> Figure:
    """Draw the rows of `ddp-course bench all-reduce` for one number of ranks.

    By default for the largest there is. Time and bus bandwidth against size, a line for
    each algorithm; the bandwidth of memory and of the loopback interface are the
    limits. Chapter 03.
    """
    rows = list(rows)
    ranks = max(row["ranks"] for row in rows) if ranks is None else ranks
    curves: dict[str, dict[int, float]] = {}
    limits: dict[str, float] = {}
    for row in rows:
        if row["ranks"] != ranks:
            continue
        name, _, limit = row["algorithm"].partition(" beside ")
        if limit:
            limits[limit] = row["theirs"]
        elif name not in NOT_DRAWN:
            curves.setdefault(name, {})[row["nbytes"]] = row["ours"]
            curves.setdefault("gloo", {})[row["nbytes"]] = row["theirs"]
    figure = plot_sizes(curves, limits, float(bus_factor("all_reduce", ranks)))
    figure.suptitle(f"{ranks} ranks", fontsize=11)
    return figure


BARS = (1.05, 0.9)
SHIFTS = {"gloo": -0.2, "shared": 0.2}  # in a case's line, so that none is hidden
MARKS = {  # (variant, beside) -> its look; colours are for ranks
    ("gloo", "default"): ("gloo, beside default", "o", "white"),
    ("gloo", "best"): ("gloo, beside best", "o", INK),
    ("shared", "default"): ("shared memory, beside default", "s", "white"),
    ("shared", "best"): ("shared memory, beside best", "s", INK),
    ("again", "default"): ("A/A: PyTorch's beside itself", "D", "#9AA2AD"),
    ("bound", "default"): ("no communication, beside default", "|", INK),
}


def ddp(rows: Iterable[Mapping[str, Any]]) -> Figure:
    """Draw the rows of `ddp-course bench ddp`: ours over PyTorch's time, by case.

    A line for each case, a mark for each of our variants beside PyTorch's DDP as it is
    (hollow) and at its best (filled), gloo above and shared memory below; 1.05 and 0.9
    are the bars. The A/A control is PyTorch's beside itself: as far as it is from 1,
    differences are noise. Chapter 05.
    """
    import matplotlib
    from matplotlib import pyplot

    cases: dict[tuple, dict[tuple, float]] = {}
    for row in rows:
        case = row["ranks"], row["preset"], row["tokens"]
        cases.setdefault(case, {})[row["variant"], row["beside"]] = row["paired"]
    if not cases:
        raise ValueError("there are no rows; at least one must be drawn")
    with matplotlib.rc_context():
        style()
        size = (9.5, 1.4 + 0.42 * max(2, len(cases)))
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        for kind, (name, marker, fill) in MARKS.items():
            shift = SHIFTS.get(kind[0], 0)
            at = [(r[kind], y + shift) for y, r in enumerate(cases.values())
                  if kind in r]  # fmt: skip
            look = {"color": INK, "markerfacecolor": fill, "markersize": 8}
            axes.plot(*zip(*at, strict=True) if at else ([], []), marker,
                      label=name, **look)  # fmt: skip
        axes.axvline(1, color=MUTED, linewidth=1)
        _draw_bars(axes)
        names = [f"{n} ranks, {preset}, {tokens} tokens" for n, preset, tokens in cases]
        axes.set_yticks(range(len(cases)), names)
        axes.set_ylim(len(cases) - 0.5, -0.5)
        axes.set_xlim(right=max(1.1, axes.get_xlim()[1]))
        axes.set_xlabel("time of a step over that of PyTorch's DDP")
        axes.grid(axis="y", color="#E3E6EA", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0)
    pyplot.close(figure)
    return figure


def _draw_bars(axes: Axes) -> None:
    """Draw what is asked for: gloo left of 1.05, at 128 tokens shared memory of 0.9."""
    for bar in BARS:
        label = "bars: gloo 1.05, and 0.9 for\nshared memory at 128 tokens"
        look = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 3))}
        axes.axvline(bar, label=label if bar == BARS[0] else "_", **look)
        axes.annotate(f"{bar}", (bar, 1), xycoords=axes.get_xaxis_transform(),
                      xytext=(0, 3), textcoords="offset points", ha="center",
                      fontsize=9)  # fmt: skip


DRAWINGS: dict[str, Callable[[list], Figure]] = {
    "all-reduce": all_reduce,
    "ddp": ddp,
    "zero": zero,
    "tp": tp,
    "pp": pp,
}
