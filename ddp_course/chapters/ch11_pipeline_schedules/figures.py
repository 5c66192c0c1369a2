"""Four schedules of the same step on one axis of time. Chapter 11."""

from __future__ import annotations

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import Lanes, draw_axis, draw_legend
from ddp_course.lab.draw.schedule_view import TITLES, equal_costs, named
from ddp_course.lab.draw.work import works_of
from ddp_course.pipeline.simulate import Simulated, simulate

RANKS, MICROBATCHES = 4, 8
NAMES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
MARGIN, PLOT_W, NOTE_W, TOP, HEAD, GAP = 16, 760, 74, 40, 24, 20


def four_schedules() -> Drawing:
    """Draw GPipe, 1F1B, interleaved 1F1B and zero bubble below each other. Ch. 11."""
    runs = {}
    for name in NAMES:
        schedule = named(name, RANKS, MICROBATCHES)
        runs[name] = simulate(schedule, equal_costs(schedule))
    long = max(float(run.makespan) for run in runs.values())
    scale, lanes = PLOT_W / long, {}
    for name, run in runs.items():
        notes = {r: f"keeps {float(k):.3g}" for r, k in enumerate(run.peak_activations)}
        lanes[name] = Lanes(works_of(run.events), scale, 0.0, notes)
    high = sum(HEAD + lane.height + GAP for lane in lanes.values())
    left = MARGIN + lanes["gpipe"].x(0)
    d = Drawing(
        left + PLOT_W + NOTE_W + MARGIN,
        TOP + high + 102,
        title=f"The same step in four orders: {RANKS} ranks, "
        f"{MICROBATCHES} microbatches",
        description=" ".join(
            f"{TITLES[name]}: {_told(run)}; on ranks 0 to {RANKS - 1} activations of "
            f"{', '.join(f'{float(k):.3g}' for k in run.peak_activations)} "
            "microbatches are kept."
            for name, run in runs.items()
        ),
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    y = float(TOP)
    for name, lane in lanes.items():
        d.text(MARGIN, y + 16, TITLES[name], bold=True, anchor="start")
        d.text(left + 92, y + 16, _told(runs[name]), size=12, anchor="start")
        with d.shifted(MARGIN, y + HEAD):
            lane.draw(d, right=left - MARGIN + PLOT_W + 8)
        y += HEAD + lane.height + GAP
    unit = "time [one microbatch forward on one rank = 1]"
    draw_axis(d, left, y - 6, scale, long, unit)
    works = [work for lane in lanes.values() for work in lane.works]
    draw_legend(d, MARGIN, y + 58, works)
    words = (
        "Numbers are microbatches. Keeps 4: at the fullest moment, the activations of "
        "4 microbatches."
    )
    d.text(MARGIN, y + 90, words, size=11, anchor="start")
    return d


def _told(run: Simulated) -> str:
    return f"ends at {float(run.makespan):.3g}, bubble {float(run.bubble):.1%}"


IMAGES = {"11_pipeline_schedules.svg": four_schedules}
