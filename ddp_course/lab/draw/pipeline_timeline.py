"""Recorded pipelines, and simulated ones on the same axis. Chapters 09, 10 and 11."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddp_course.lab.draw.bars import draw_axis
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import Lanes, draw_legend
from ddp_course.lab.draw.work import Work, idle_share, ranks_of, window, works_of

MARGIN, TOP, PLOT_W, NOTE_W, RUN_GAP = 16, 44, 720, 92, 18


def pipeline_timeline(
    runs: Mapping[str, Iterable[Any]] | Iterable[Any],
    unit: float = 1.0,
    width: float | None = None,
) -> Drawing:
    """Draw what the ranks of pipelines computed when, one run below the other.

    `runs` maps a name such as "measured" to the events of a step: `measure.Event`s of
    the lane "compute", whose detail names stage and microbatch, or the events of
    `pipeline.simulate`, of which time 1 lasts `unit` seconds. All runs begin at 0 on
    one axis, which ends at `width` in ms or with the longest run. Events alone are one
    run. Raises ValueError for no runs, no events, and times that are not above 0.
    Chapters 10 and 11.
    """
    named = runs if isinstance(runs, Mapping) else {"recorded": runs}
    return _drawing("What each rank computed, and when", _read(named, unit), width)


def who_works(events: Iterable[Any], width: float | None = None) -> Drawing:
    """Draw which rank computes and which ones wait, for one run. Chapter 09.

    `events` are `measure.Event`s of which those of the lane "compute" count. The axis
    ends at `width` in ms or with the last event. Raises ValueError for no events and a
    width that is not above 0.
    """
    works = _read({"": events}, 1.0)
    return _drawing("Who works, and who waits", works, width)


def _read(runs: Mapping[str, Iterable[Any]], unit: float) -> dict[str, Sequence[Work]]:
    """Return the works of every run. Raises ValueError if there is no run."""
    if not runs:
        raise ValueError("there are no runs; at least one must be drawn")
    return {name: works_of(events, unit) for name, events in runs.items()}


def _drawing(
    title: str, runs: Mapping[str, Sequence[Work]], width: float | None
) -> Drawing:
    """Draw the lanes of all runs on one axis of `width` ms."""
    longest = max(b - a for a, b in map(window, runs.values())) * 1e3
    width = longest if width is None else width
    if not 0 < width < math.inf:
        raise ValueError(f"width is {width!r}; it must be a time in ms, above 0")
    if width < longest * (1 - 1e-9):
        raise ValueError(
            f"width is {width:g} ms, but a run lasts {longest:.4g} ms: draw all of it"
        )
    scale = PLOT_W / width * 1e3  # pixels per second
    lanes = {name: _lanes(works, scale) for name, works in runs.items()}
    head = {name: 20 if name else 0 for name in runs}
    high = sum(head[name] + lane.height + RUN_GAP for name, lane in lanes.items())
    left = lanes[next(iter(lanes))].x(window(runs[next(iter(runs))])[0])
    d = Drawing(
        2 * MARGIN + left + PLOT_W + NOTE_W,
        TOP + high + 78,
        title=title,
        description=" ".join(_in_words(name, works) for name, works in runs.items()),
    )
    d.text(MARGIN, 26, title, size=15, bold=True, anchor="start")
    y = float(TOP)
    for name, lane in lanes.items():
        if name:
            says = f"{name}: {_lasts(runs[name])}"
            d.text(MARGIN, y + 10, says, bold=True, anchor="start")
        y += head[name]
        with d.shifted(MARGIN, y):
            lane.draw(d, right=left + PLOT_W + 10)
        y += lane.height + RUN_GAP
    draw_axis(d, MARGIN + left, y - 6, PLOT_W, width, "time [ms]")
    draw_legend(d, MARGIN, y + 56, [work for works in runs.values() for work in works])
    return d


def _lanes(works: Sequence[Work], scale: float) -> Lanes:
    notes = {rank: f"waits {idle_share(works, rank):.1%}" for rank in ranks_of(works)}
    return Lanes(works, scale, notes=notes)


def _lasts(works: Sequence[Work]) -> str:
    """Say how long a run takes, and how much of it is waiting."""
    start, end = window(works)
    return f"{(end - start) * 1e3:.4g} ms, {idle_share(works):.1%} of it waiting"


def _in_words(name: str, works: Sequence[Work]) -> str:
    each = "; ".join(
        f"rank {rank} computes {sum(work.rank == rank for work in works)} times and "
        f"waits {idle_share(works, rank):.1%} of the time"
        for rank in ranks_of(works)
    )
    return f"{name + ': ' if name else ''}{_lasts(works)}. {each[0].upper()}{each[1:]}."
