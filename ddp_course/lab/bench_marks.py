"""What figures of a bench share: a line for each case, a mark for each comparison."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddp_course.lab.draw.plots import GRID
from ddp_course.lab.palette import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Case = tuple[int, str, int]  # ranks, preset, tokens
CONTROL = "#9AA2AD"


@dataclass(frozen=True)
class Mark:
    """How the ratio of `variant` to `beside` is drawn: in greys, colours are for ranks.

    Attributes:
        variant: whose time is divided.
        beside: by whose.
        name: in the legend.
        marker: matplotlib's.
        fill: its colour.
        shift: in a case's line, so that none is hidden; 0.5 is half of the next one.
        asked: by tokens, at most which ratio is asked for.
    """

    variant: str
    beside: str
    name: str
    marker: str
    fill: str = INK
    shift: float = 0.0
    asked: Mapping[int, float] | None = None


def cases_of(rows: Iterable[Mapping[str, Any]]) -> list[Case]:
    """Return the cases of rows, in their order. Raises ValueError for no rows."""
    cases = list(dict.fromkeys(map(case_of, rows)))
    if not cases:
        raise ValueError("there are no rows; at least one must be drawn")
    return cases


def case_of(row: Mapping[str, Any]) -> Case:
    """Return which case a row is of."""
    return row["ranks"], row["preset"], row["tokens"]


def draw_marks(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    marks: Sequence[Mark],
    cases: Sequence[Case],
) -> None:
    """Draw every mark of every case, and a dash for what is asked for."""
    for mark in marks:
        for y, (_, _, tokens) in enumerate(cases):
            if mark.asked and tokens in mark.asked:
                draw_dash(axes, mark.asked[tokens], y + mark.shift)
    for mark in marks:
        at = [
            (row["paired"], cases.index(case_of(row)) + mark.shift)
            for row in rows
            if (row["variant"], row["beside"]) == (mark.variant, mark.beside)
            and "paired" in row
        ]
        if at:
            look = {"color": INK, "markerfacecolor": mark.fill, "markersize": 7}
            axes.plot(*zip(*at, strict=True), mark.marker, label=mark.name, **look)


def draw_dash(axes: Axes, x: float, y: float) -> None:
    """Draw what is asked for: an upright dash."""
    look = {"color": INK, "linewidth": 2.2, "linestyle": (0, (2, 1.2))}
    axes.plot([x, x], [y - 0.19, y + 0.19], label="asked for: at most this", **look)


def frame(axes: Axes, cases: Sequence[Case], named: bool = True) -> None:
    """Give a panel its axes: a line for each case, and where both are equal."""
    axes.axvline(1, color=MUTED, linewidth=1, zorder=0)
    names = [f"{n} ranks, {preset}, {tokens} tokens" for n, preset, tokens in cases]
    axes.set_yticks(range(len(cases)), names if named else [""] * len(cases))
    axes.set_ylim(len(cases) - 0.5, -0.5)
    low, high = axes.get_xlim()
    axes.set_xlim(math.floor(10 * low) / 10, max(1.1, high))
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)


def legend_below(figure: Figure, columns: int = 3) -> None:
    """Draw one legend for all panels, below them."""
    marks = {
        line.get_label(): line
        for axes in figure.axes
        for line in axes.lines
        if not line.get_label().startswith("_")
    }
    figure.legend(
        marks.values(), marks.keys(), loc="outside lower center", ncols=columns
    )
