"""Figures of what DataParallel measured: bytes through replica 0, and the lock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ddp_course.lab.draw.plots import GRID, MIB, style
from ddp_course.lab.palette import INK, MUTED, darker, lighter, rank_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WAYS = {  # of `gil`: how each is written and filled
    "one after another": ("one after\nanother", "#FFFFFF"),
    "threads": ("threads", "#C3C9D1"),
    "DataParallel": ("Data-\nParallel", "#9AA2AD"),
    "processes": ("processes", "#5F6670"),
}


def plot_moves(moves: Iterable[Any]) -> Figure:
    """Draw the bytes in MiB that each replica sends (full) and receives (lighter).

    `moves` are those of one iteration, `DataParallel.moves`. Raises ValueError if there
    are none. Chapter 04.
    """
    import matplotlib
    from matplotlib import pyplot

    moves = list(moves)
    if not moves:
        raise ValueError("there are no moves; use DataParallel(..., record=True)")
    replicas = 1 + max(max(move.src, move.dst) for move in moves)
    sent, received = [0.0] * replicas, [0.0] * replicas
    for move in moves:
        sent[move.src] += move.nbytes / MIB
        received[move.dst] += move.nbytes / MIB
    with matplotlib.rc_context():
        style()
        size = (max(4.5, 2 + 1.1 * replicas), 3.2)
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        for shift, values, pale in ((-0.2, sent, False), (0.2, received, True)):
            colors = [rank_color(k) for k in range(replicas)]
            fills = [lighter(color) if pale else color for color in colors]
            xs = [k + shift for k in range(replicas)]
            edges = [darker(color) for color in colors]
            bars = axes.bar(xs, values, 0.38, color=fills, ec=edges)
            axes.bar_label(bars, fmt="%.1f", fontsize=9, padding=2)
            look = {"color": lighter(MUTED) if pale else MUTED, "ec": INK}
            axes.bar([0], [0], label=("sends", "receives")[pale], **look)
        axes.set_xticks(range(replicas), [f"replica {k}" for k in range(replicas)])
        axes.set_ylabel("bytes [MiB]")
        axes.set_ylim(0, 1.12 * max(sent + received))
        axes.tick_params(axis="x", length=0)
        axes.grid(axis="y", **GRID)
        axes.set_axisbelow(True)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    pyplot.close(figure)
    return figure


def plot_gil(timings: Iterable[Any]) -> Figure:
    """Draw how much faster than one thread n replicas are, in each way and model.

    `timings` come from `gil.threads_against_processes`. A bar is the median,
    a dot the ratio in one turn. Dashed: one thread that does everything; dotted: the
    ideal, n times as fast. Raises ValueError if there are none. Chapter 04.
    """
    import matplotlib
    from matplotlib import pyplot

    by_model: dict[str, dict[str, Any]] = {}
    for timing in timings:
        by_model.setdefault(timing.model, {})[timing.way] = timing
    if not by_model:
        raise ValueError("there are no timings; at least one must be drawn")
    with matplotlib.rc_context():
        style()
        figure, panels = pyplot.subplots(
            1, len(by_model), figsize=(4.6 * len(by_model), 3.4), sharey=True,
            layout="constrained", squeeze=False,
        )  # fmt: skip
        for axes, (model, ways) in zip(panels[0], by_model.items(), strict=True):
            _draw_ways(axes, ways)
            axes.set_title(model, fontsize=11)
        replicas = next(iter(ways.values())).replicas
        for axes in panels[0]:
            axes.axhline(replicas, color=INK, linewidth=1.4, linestyle=(0, (1, 2)))
            look = {"textcoords": "offset points", "fontsize": 9, "va": "bottom"}
            axes.annotate(f"ideal: {replicas}", (0, replicas), xytext=(0, 3),
                          ha="center", **look)  # fmt: skip
        panels[0][0].set_ylabel(f"speed-up, {replicas} replicas [times]")
        panels[0][0].set_ylim(0, max(1.12 * replicas, panels[0][0].get_ylim()[1]))
    pyplot.close(figure)
    return figure


def _draw_ways(axes: Axes, ways: Mapping[str, Any]) -> None:
    """Draw a bar for each way, and a dot for each of its turns."""
    order = [way for way in WAYS if way in ways]
    alone = ways.get("one after another")
    for x, way in enumerate(order):
        timing = ways[way]
        axes.bar([x], [timing.speed_up], 0.72, color=WAYS[way][1], ec=INK)
        label = (x, 0), f"{timing.speed_up:.2f}"
        axes.annotate(label[1], label[0], xytext=(0, 4), textcoords="offset points",
                      ha="center", fontsize=9, color="black",
                      bbox={"fc": "white", "ec": "none", "pad": 1})  # fmt: skip
        if alone is not None and way != "one after another":
            ratios = [a / b for a, b in zip(alone.turns, timing.turns, strict=True)]
            spread = [x + 0.22 * math.sin(9 * i) for i in range(len(ratios))]
            look = {"color": INK, "markerfacecolor": "white", "markersize": 4}
            axes.plot(spread, ratios, "o", **look)
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.set_xticks(range(len(order)), [WAYS[way][0] for way in order], fontsize=10)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
