"""Bubbles and activations of pipelines: measured, and what the formulas say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_course import theory
from ddp_course.lab.draw.per_rank import plot_bytes
from ddp_course.lab.draw.plots import GRID, style
from ddp_course.lab.palette import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = tuple[str, float, float, float | None]  # name, measured, formula, PyTorch's
OURS, THEIRS = "#9AA2AD", "#FFFFFF"  # greys: colours are for ranks


def bubbles(rows: Iterable[Sequence[Any]]) -> Figure:
    """Draw the share of time that pipelines wait: measured, and the formula as a mark.

    A row is (name, measured, formula), or with PyTorch's as a fourth value (None if it
    has none). All are shares of the ranks' time, from 0 to 1. Raises ValueError for no
    rows, a name twice, and what is no share. Chapters 10 and 11.
    """
    import matplotlib
    from matplotlib import pyplot

    rows = checked_rows(rows)
    with matplotlib.rc_context():
        style()
        size = (2.4 + 1.25 * max(3, len(rows)), 3.6)
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        draw_bubbles(axes, rows)
        _frame(axes)
    pyplot.close(figure)
    return figure


def draw_bubbles(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw rows into `axes`, without a legend."""
    for x, (_, ours, formula, theirs) in enumerate(rows):
        pair = theirs is not None
        _bar(axes, x - 0.19 * pair, ours, 0.36 if pair else 0.6, OURS)
        if pair:
            _bar(axes, x + 0.19, theirs, 0.36, THEIRS)
        for color, width in (("white", 3.6), (INK, 1.8)):
            ends = [100 * float(formula)] * 2
            axes.plot([x - 0.42, x + 0.42], ends, color=color, linewidth=width)
    names = [name.replace(", ", ",\n") for name, *_ in rows]
    axes.set_xticks(range(len(rows)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.set_ylabel("bubble [% of the ranks' time]")
    axes.bar([0], [0], label="measured", color=OURS, ec=INK)
    if any(theirs is not None for *_, theirs in rows):
        axes.bar([0], [0], label="PyTorch's", color=THEIRS, ec=INK)
    axes.plot([], [], color=INK, linewidth=2.4, label="formula")


def _bar(axes: Axes, x: float, share: float, wide: float, fill: str) -> None:
    """Draw a bar and write its number above it."""
    high = 100 * float(share)
    axes.bar([x], [high], wide, color=fill, ec=INK, linewidth=0.8)
    axes.annotate(f"{high:.1f}", (x, high), xytext=(0, 5), fontsize=9, ha="center",
                  textcoords="offset points", zorder=5,
                  bbox={"fc": "white", "ec": "none", "pad": 0.8})  # fmt: skip


def _frame(axes: Axes) -> None:
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.2)


def checked_rows(rows: Iterable[Sequence[Any]]) -> list[Row]:
    """Return the rows of `bubbles`, all with a fourth value; ValueError as there."""
    rows = [(f"{row[0]}", *row[1:], *[None] * (4 - len(row))) for row in rows]
    if not rows:
        raise ValueError("there are no rows; at least one must be drawn")
    names = [name for name, *_ in rows]
    if len(set(names)) < len(names):
        raise ValueError(f"the rows are of {names}; each name may be there once")
    for name, *shares in rows:
        for share in shares[:2] + [s for s in shares[2:] if s is not None]:
            _check_share(f"the bubble of {name!r}", share)
    return rows


def _check_share(what: str, share: Any) -> None:
    if not 0 <= share <= 1:
        raise ValueError(f"{what} is {share}; it must be a share of time, 0 to 1")


# ---- activations ---------------------------------------------------------------------


def activation_peaks(
    measured: Mapping[str, Sequence[float]], theory: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw the activations that each rank keeps at most, in microbatches, by schedule.

    Both map a schedule's name to a number for every rank; theory is drawn as a mark. A
    microbatch's activations on all stages of a rank count as 1. Raises ValueError if
    the two are not of the same schedules and as many ranks. Chapters 10 and 11.
    """
    figure = plot_bytes(measured, theory)
    figure.axes[0].set_ylabel("kept activations [microbatches]")
    return figure


# ---- how the bubble shrinks ----------------------------------------------------------


def bubble_curve(
    measured: Mapping[int, Mapping[int, float]],
    formula: Callable[[int, int], float] | None = None,
    most: int | None = None,
) -> Figure:
    """Draw the bubble against the number of microbatches, a curve for each p.

    `measured` maps a number of ranks p to {number of microbatches m: share of time}; a
    p without points is a curve alone. `formula` is called with p and m; by default it
    is GPipe's (p-1)/(m+p-1). Curves run to `most` microbatches. Raises ValueError for
    no p, numbers below 1 and what is no share. Chapter 10.
    """
    import matplotlib
    from matplotlib import pyplot

    formula = partial(theory.pipeline_bubble, "gpipe") if formula is None else formula
    most = _check_curves(measured, most)
    with matplotlib.rc_context():
        style()
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        ms = range(1, most + 1)
        for p, points in measured.items():
            curve = [100 * float(formula(p, m)) for m in ms]
            axes.plot(ms, curve, color=MUTED, linewidth=1.4)
            axes.annotate(f"p = {p}", (most, curve[-1]), xytext=(6, 0), va="center",
                          textcoords="offset points", fontsize=10)  # fmt: skip
            at = [(m, 100 * float(share)) for m, share in sorted(points.items())]
            if at:
                look = {"color": INK, "markerfacecolor": OURS, "markersize": 7}
                axes.plot(*zip(*at, strict=True), "o", **look)
        axes.plot([], [], "o", color=INK, markerfacecolor=OURS, label="measured")
        axes.plot([], [], color=MUTED, label="formula")
        axes.set_xlabel("microbatches m")
        axes.set_ylabel("bubble [% of the ranks' time]")
        axes.set_xlim(0, most + 0.5)
        axes.set_ylim(0, None)
        _frame(axes)
    pyplot.close(figure)
    return figure


def _check_curves(measured: Mapping[int, Mapping[int, float]], most: int | None) -> int:
    """Return how many microbatches the curves run to."""
    if not measured:
        raise ValueError("there is no number of ranks; at least one must be drawn")
    for p, points in measured.items():
        for name, value in (("p", p), *(("m", m) for m in points)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be 1 or more")
        for m, share in points.items():
            _check_share(f"the bubble of p = {p}, m = {m}", share)
    largest = max((m for points in measured.values() for m in points), default=16)
    most = largest if most is None else most
    if not 2 <= most < math.inf:
        raise ValueError(f"most is {most!r}; curves need 2 microbatches or more")
    return max(most, largest)
