"""Recorded pipelines, and simulated ones on the same axis. Chapters 09, 10 and 11."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import draw_runs
from ddp_course.lab.draw.work import (
    idle_share,
    legend_of,
    ranks_of,
    run_of,
    window,
    works_of,
)


def pipeline_timeline(
    runs: Mapping[str, Iterable[Any]] | Iterable[Any],
    unit: float = 1.0,
    width: float | None = None,
    title: str = "What each rank computed, and when",
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
    if not named:
        raise ValueError("there are no runs; at least one must be drawn")
    works = {name: works_of(events, unit * 1e3) for name, events in named.items()}
    longest = max(b - a for a, b in map(window, works.values()))
    width = longest if width is None else width
    if not 0 < width < math.inf:
        raise ValueError(f"width is {width!r}; it must be a time in ms, above 0")
    if width < longest * (1 - 1e-9):
        raise ValueError(
            f"width is {width:g} ms, but a run lasts {longest:.4g} ms: draw all of it"
        )
    drawn = []
    for name, its in works.items():
        start, end = window(its)
        lasts = f"{end - start:.4g} ms, {idle_share(its):.1%} of it waiting"
        notes = {rank: f"waits {idle_share(its, rank):.1%}" for rank in ranks_of(its)}
        drawn.append(run_of(its, width, name and f"{name}: {lasts}", notes=notes))
    legend = legend_of(work for its in works.values() for work in its)
    return draw_runs(title, drawn, "time [ms]", width, legend=legend)


def who_works(events: Iterable[Any]) -> Drawing:
    """Draw which rank computes and which ones wait, for one run. Chapter 09.

    `events` are `measure.Event`s of which those of the lane "compute" count. Raises
    ValueError for no events.
    """
    return pipeline_timeline({"": events}, title="Who works, and who waits")
