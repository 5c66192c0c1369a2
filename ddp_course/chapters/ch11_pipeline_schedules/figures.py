"""One step in two orders, on one axis of time. Chapter 11.

The first order and the last one of the chapter, without the numbers that its reader is
asked to predict of the orders between them.
"""

from __future__ import annotations

from ddp_course.lab.draw.bars import draw_axis
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import Lanes, draw_legend
from ddp_course.lab.draw.schedule_view import TITLES, equal_costs, named
from ddp_course.lab.draw.work import works_of
from ddp_course.pipeline.simulate import simulate

RANKS, MICROBATCHES = 4, 8
NAMES = ("gpipe", "zero_bubble")
MARGIN, PLOT_W, TOP, HEAD, GAP = 16, 760, 40, 24, 20


def two_orders() -> Drawing:
    """Draw GPipe above zero bubble. Chapter 11."""
    runs = {}
    for name in NAMES:
        schedule = named(name, RANKS, MICROBATCHES)
        runs[name] = simulate(schedule, equal_costs(schedule))
    long = max(float(run.makespan) for run in runs.values())
    scale = PLOT_W / long
    lanes = {n: Lanes(works_of(run.events), scale, 0.0) for n, run in runs.items()}
    high = sum(HEAD + lane.height + GAP for lane in lanes.values())
    left = MARGIN + lanes["gpipe"].x(0)
    d = Drawing(
        left + PLOT_W + 2 * MARGIN,
        TOP + high + 102,
        title=f"The same step in two orders: {RANKS} ranks, {MICROBATCHES} "
        "microbatches",
        description=" ".join(
            f"{TITLES[name]}, rank by rank: "
            + "; ".join(" ".join(map(str, row)) for row in run.schedule.ranks)
            + "."
            for name, run in runs.items()
        ),
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    y = float(TOP)
    for name, lane in lanes.items():
        d.text(MARGIN, y + 16, TITLES[name], bold=True, anchor="start")
        with d.shifted(MARGIN, y + HEAD):
            lane.draw(d)
        y += HEAD + lane.height + GAP
    unit = "time [one microbatch forward on one rank = 1]"
    draw_axis(d, left, y - 6, scale * long, long, unit)
    works = [work for lane in lanes.values() for work in lane.works]
    draw_legend(d, MARGIN, y + 58, works)
    words = "Numbers are microbatches. Dashed: the rank waits."
    d.text(MARGIN, y + 90, words, size=11, anchor="start")
    return d


IMAGES = {"11_pipeline_schedules.svg": two_orders}
