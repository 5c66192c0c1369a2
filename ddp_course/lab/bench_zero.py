"""Figure of `ddp-course bench zero`: all stages beside PyTorch's, time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_course.lab.bench_marks import (
    Case,
    case_of,
    cases_of,
    draw_dash,
    frame,
    legend_below,
)
from ddp_course.lab.draw.plots import style
from ddp_course.lab.palette import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {  # of a stage: its title, PyTorch's short name, what it is
    "zero1": ("stage 1", "ZRO", "DDP and ZeroRedundancyOptimizer"),
    "zero2": ("stage 2", "ZRO", "DDP and ZeroRedundancyOptimizer"),
    "zero3": ("stage 3", "fully_shard", "fully_shard"),
}
ASKED = {  # (stage, how) -> tokens -> at most so much of PyTorch's best
    ("zero1", "gloo"): {128: 1.0, 1024: 1.0},
    ("zero1", "shared"): {128: 0.8, 1024: 0.8},
    ("zero3", "gloo"): {128: 0.6, 1024: 0.87},
    ("zero3", "shared"): {128: 0.45},
}
PEAK = 1.05  # asked for: at most so much of the peak memory of fully_shard
MARKS = {  # (how, beside) -> its look; colours are for ranks
    ("gloo", "default"): ("gloo, beside default", "o", "white"),
    ("gloo", "best"): ("gloo, beside best", "o", INK),
    ("gloo kept", "kept"): ("gloo, both kept after forward", "^", INK),
    ("shared", "default"): ("shared memory, beside default", "s", "white"),
    ("shared", "best"): ("shared memory, beside best", "s", INK),
    ("shared kept", "kept"): ("shared memory, both kept", "v", INK),
    ("again", "default"): ("A/A: PyTorch's beside itself", "D", "#9AA2AD"),
    ("patient", "best"): ("PyTorch's, its threads interrupt nobody", "x", INK),
    ("bound", "best"): ("no communication, beside best", "|", INK),
}
OTHERS = ("again", "patient", "bound")  # none of our stages
SHIFTS = {"gloo": -0.22, "gloo kept": -0.22, "shared": 0.22, "shared kept": 0.22}


def zero(rows: Iterable[Mapping[str, Any]]) -> Figure:
    """Draw the rows of `ddp-course bench zero`: ours over PyTorch's, by case.

    Time of a step of stages 1, 2 and 3, and peak memory of stage 3. A line for each
    case, gloo above and shared memory below; hollow marks beside PyTorch's as it is,
    filled ones beside its best; a short upright dash is what is asked for. The A/A
    control is PyTorch's beside itself: as far as it is from 1, differences are noise.
    Raises ValueError if there are no rows. Chapters 07 and 08.
    """
    import matplotlib
    from matplotlib import pyplot

    rows = list(rows)
    cases = cases_of(rows)
    with matplotlib.rc_context():
        style()
        size = (11.5, 3 + 0.72 * max(2, len(cases)))
        figure, grid = pyplot.subplots(2, 2, figsize=size, layout="constrained")
        figure.get_layout_engine().set(wspace=0.05, hspace=0.05)
        for axes, (stage, (title, _, theirs)) in zip(
            grid.flat, PANELS.items(), strict=False
        ):
            _draw_asked(axes, stage, cases)
            _draw_times(axes, stage, rows, cases)
            axes.set_title(f"{title}: time of a step", fontsize=11)
            axes.set_xlabel(f"over that of {theirs}")
        _draw_peaks(grid[1, 1], rows, cases)
        for axes in grid.flat:
            frame(axes, cases, named=axes in grid[:, 0])
        legend_below(figure)
    pyplot.close(figure)
    return figure


def _draw_times(
    axes: Axes, stage: str, rows: Sequence[Mapping[str, Any]], cases: Sequence[Case]
) -> None:
    """Draw the marks of a stage: each of our variants beside each of PyTorch's."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        who, _, how = row["variant"].partition(" ")
        other, _, beside = row["beside"].partition(" ")
        if other != PANELS[stage][1] or "paired" not in row:
            continue
        how = "bound" if who == "bound" else how
        if (how, beside) in MARKS and (who == stage or how in OTHERS):
            y = cases.index(case_of(row)) + SHIFTS.get(how, 0)
            found.setdefault((how, beside), []).append((row["paired"], y))
    for kind, (name, marker, fill) in MARKS.items():
        if kind in found:
            look = {"color": INK, "markerfacecolor": fill, "markersize": 7}
            axes.plot(*zip(*found[kind], strict=True), marker, label=name, **look)


def _draw_asked(axes: Axes, stage: str, cases: Sequence[Case]) -> None:
    """Draw what is asked for in each case: a dash for gloo, one for shared memory."""
    for (of, how), bars in ASKED.items():
        for y, (_, _, tokens) in enumerate(cases):
            if of == stage and tokens in bars:
                draw_dash(axes, bars[tokens], y + SHIFTS[how])


def _draw_peaks(
    axes: Axes, rows: Sequence[Mapping[str, Any]], cases: Sequence[Case]
) -> None:
    """Draw the peak of stage 3 over PyTorch's: a dot, or a triangle if both keep."""
    for y, _ in enumerate(cases):
        draw_dash(axes, PEAK, y)
    for kept, kind in ((False, ("gloo", "best")), (True, ("gloo kept", "kept"))):
        name, marker, fill = MARKS[kind]
        at = [
            (row["ours"] / row["theirs"], cases.index(case_of(row)))
            for row in rows
            if row["variant"].startswith("peak of zero3")
            and row["variant"].endswith(" kept") == kept
        ]
        if at:
            look = {"color": INK, "markerfacecolor": fill, "markersize": 7}
            axes.plot(*zip(*at, strict=True), marker, label=name, **look)
    axes.set_title("stage 3: most bytes alive in a step", fontsize=11)
    axes.set_xlabel("over that of fully_shard")
