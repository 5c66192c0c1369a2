"""Figures of what a bench measured, drawn from its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ddp_course.lab.measured import plot_sizes
from ddp_course.theory import bus_factor

if TYPE_CHECKING:
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


DRAWINGS: dict[str, Callable[[list], Figure]] = {"all-reduce": all_reduce}
