"""The figure of any bench, drawn from its rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_course.bench.table import grouped, ratio_of, title_of
from ddp_course.bench.turns import Pair
from ddp_course.lab.draw.plots import GRID, Drawn, canvas, plot
from ddp_course.lab.palette import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osv^PpDX<>*hd8H"
CONTROL = "#9AA2AD"


@plot
def plot_bench(pairs: Iterable[Pair], rows: Sequence[Mapping[str, Any]]) -> Drawn:
    """Draw a bench's ratios: a panel per denominator, a line per case, a mark per pair.

    The marks are grey, since colours stand for ranks. A short upright dash is the bar
    that a ratio should not exceed. The control (light grey) measures the same variant
    twice: its distance from 1 is noise. Raises ValueError for no rows.
    """
    panels = grouped(pairs, rows)
    if not panels:
        raise ValueError("there are no rows; at least one must be drawn")
    heights = [
        0.9 + 0.34 * max(len({c for _, found in columns for c in found}), len(columns))
        for columns in panels.values()
    ]
    below = {"nrows": len(panels), "height_ratios": heights, "squeeze": False}
    figure, grid = canvas((9.5, sum(heights)), **below)
    for axes, (over, columns) in zip(grid[:, 0], panels.items(), strict=True):
        _draw_panel(axes, columns)
        axes.set_xlabel(f"over {over}")
    return figure, f"Ratios of a bench, over {', '.join(map(str, panels))}."


def _draw_panel(axes: Axes, columns: list[tuple[Pair, dict]]) -> None:
    cases = list(dict.fromkeys(case for _, found in columns for case in found))
    ratios = [ratio_of(row) for _, found in columns for row in found.values()]
    for index, (pair, found) in enumerate(columns):
        # Spread a case's marks over its line, so that none hides another.
        shift = 0.8 * (index + 0.5) / len(columns) - 0.4
        color = CONTROL if pair.control else INK
        fill = "white" if index % 2 else color
        axes.plot(
            [ratio_of(row) for row in found.values()],
            [cases.index(case) + shift for case in found],
            MARKERS[index % len(MARKERS)],
            label=f"{title_of(pair)} (noise)" if pair.control else title_of(pair),
            color=color, markerfacecolor=fill, markersize=6,
        )  # fmt: skip
        for case, row in found.items():
            if (bar := pair.bar(row)) is not None:
                at = [cases.index(case) + shift + d for d in (-0.16, 0.16)]
                axes.plot([bar, bar], at, color=INK, linewidth=2.2, label="_bar")
    axes.axvline(1, color=MUTED, linewidth=1, zorder=0, label="_equal")
    if max(ratios) > 10 * min(ratios):
        axes.set_xscale("log")
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.5, -0.5)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), borderaxespad=0, fontsize=9)
