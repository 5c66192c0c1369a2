"""One step in two orders, on one axis of time. Chapter 11.

The figure shows the first and the last order of the chapter. It omits the numbers of
the other orders, which readers are asked to predict.
"""

from __future__ import annotations

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import draw_runs
from ddp_course.lab.draw.pipeline_timeline import legend_of, run_of, works_of
from ddp_course.lab.draw.schedule_view import equal_costs, named
from ddp_course.pipeline.simulate import simulate_schedule
from ddp_course.spec import SCHEDULES

RANKS, MICROBATCHES = 4, 8


def two_orders() -> Drawing:
    """Draw GPipe above zero bubble. Chapter 11."""
    works, long = {}, 0.0
    for name in ("gpipe", "zero_bubble"):
        schedule = named(name, RANKS, MICROBATCHES)
        run = simulate_schedule(schedule, equal_costs(schedule))
        works[name], long = works_of(run.events), max(long, float(run.makespan))
    return draw_runs(
        f"The same step in two orders: {RANKS} ranks, {MICROBATCHES} microbatches",
        [run_of(its, long, SCHEDULES[name].title) for name, its in works.items()],
        "time [one microbatch forward on one rank = 1]",
        long,
        legend=legend_of(work for its in works.values() for work in its),
        foot="Numbers are microbatches. Dashed: the rank waits.",
    )


IMAGES = {"11_pipeline_schedules.svg": two_orders}
