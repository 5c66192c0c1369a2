"""Schedules on a plane: what a rank keeps, and how long it waits. Chapter 11."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ddp_course.lab.draw.ledgers import _name_points
from ddp_course.lab.draw.plots import GRID, style
from ddp_course.lab.palette import INK, MUTED

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def memory_against_bubble(rows: Iterable[Sequence[Any]]) -> Figure:
    """Draw the bubble of schedules against the activations that a rank keeps.

    A row is (name, microbatches whose activations the fullest rank keeps, bubble as a
    share of time). Points that no other one beats in both are filled, the others
    hollow. Raises ValueError for no rows, a name twice, a peak that is not above 0 and
    what is no share. Chapter 11.
    """
    import matplotlib
    from matplotlib import pyplot

    points = _checked(rows)
    with matplotlib.rc_context():
        style()
        figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
        for x, y in points.values():
            fill = "white" if _is_beaten((x, y), points.values()) else INK
            axes.plot([x], [y], "o", color=INK, markerfacecolor=fill, markersize=9)
        axes.set_xlim(0, 1.3 * max(x for x, _ in points.values()))
        axes.set_ylim(0, 1.15 * max(y for _, y in points.values()))
        _name_points(axes, points)
        axes.set_xlabel("activations kept by the fullest rank [microbatches]")
        axes.set_ylabel("bubble [% of the ranks' time]")
        axes.plot([], [], "o", color=INK, label="nothing is better in both")
        hollow = {"color": INK, "markerfacecolor": "white"}
        axes.plot([], [], "o", **hollow, label="something is")
        axes.legend(loc="upper right", edgecolor=MUTED)
        axes.grid(**GRID)
        axes.set_axisbelow(True)
    pyplot.close(figure)
    return figure


def _checked(rows: Iterable[Sequence[Any]]) -> dict[str, tuple[float, float]]:
    """Return (peak, bubble in per cent) by name."""
    rows = list(rows)
    if not rows:
        raise ValueError("there are no rows; at least one must be drawn")
    points: dict[str, tuple[float, float]] = {}
    for name, peak, share in rows:
        if name in points:
            raise ValueError(f"{name!r} is there twice; each name may be there once")
        if not 0 < peak < math.inf:
            raise ValueError(f"{name!r} keeps {peak} microbatches; it must be above 0")
        if not 0 <= share <= 1:
            raise ValueError(f"the bubble of {name!r} is {share}; it must be a share")
        points[name] = float(peak), 100 * float(share)
    return points


def _is_beaten(
    point: tuple[float, float], others: Iterable[tuple[float, float]]
) -> bool:
    """Tell whether another point is at least as good in both, and better in one."""
    return any(o != point and o[0] <= point[0] and o[1] <= point[1] for o in others)
