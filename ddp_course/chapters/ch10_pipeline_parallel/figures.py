"""A model cut into stages, a batch into microbatches, and how the bubble shrinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddp_course.lab.draw.bars import draw_axis
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import Lanes
from ddp_course.lab.draw.plots import GRID, style
from ddp_course.lab.draw.schedule_view import named
from ddp_course.lab.draw.work import Work, idle_share, works_of
from ddp_course.lab.palette import INK, MUTED, rank_color
from ddp_course.pipeline.simulate import Costs, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES, MICROBATCHES = 4, 4
PARTS = ("embed, block 0", "block 1", "block 2", "block 3, head")
MARGIN, PLOT_W, NOTE_W, TOP = 16, 720, 90, 54
STAGE_W, STAGE_H, STAGE_GAP = 150, 40, 64


def staircase() -> Drawing:
    """Draw a model on four ranks, and a batch that passes it whole, or in four parts.

    Both on one axis: the batch takes every stage as long, whether it is cut or not.
    Chapter 10.
    """
    times = Costs(*[MICROBATCHES] * 3)  # F, I and W of a whole batch
    whole = works_of(simulate(named("naive", STAGES, 1), times).events)
    whole = [replace(work, microbatch=None) for work in whole]
    parts = works_of(simulate(named("gpipe", STAGES, MICROBATCHES)).events)
    long = max(work.end for work in whole)
    scale = PLOT_W / long
    lanes = {
        f"The whole batch at once: at any time {STAGES - 1} of {STAGES} ranks wait": (
            Lanes(whole, scale)
        ),
        f"The same batch in {MICROBATCHES} microbatches: the next one follows": (
            Lanes(parts, scale)
        ),
    }
    high = TOP + STAGE_H + 50
    left = MARGIN + Lanes(whole, scale).x(0)
    d = Drawing(
        left + PLOT_W + NOTE_W + MARGIN,
        high + sum(lane.height + 58 for lane in lanes.values()) + 40,
        title="Stages of a model, and microbatches of a batch",
        description=_in_words(whole, parts),
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    with d.shifted(MARGIN + 20, TOP):
        _draw_stages(d)
    y = float(high)
    for says, lane in lanes.items():
        d.text(MARGIN, y, says, bold=True, anchor="start")
        with d.shifted(MARGIN, y + 12):
            lane.draw(d)
        end = max(work.end for work in lane.works)
        words = f"waiting: {idle_share(lane.works):.0%}"
        d.text(MARGIN + lane.x(end) + 10, y + 12 + lane.height / 2, words, size=12,
               anchor="start")  # fmt: skip
        y += lane.height + 58
    unit = "time [one microbatch forward through one stage = 1]"
    draw_axis(d, left, y - 36, scale * long, long, unit)
    words = (
        "Solid: forward. Lighter: backward, twice as long. Dashed: a rank waits. "
        "Numbers are microbatches."
    )
    d.text(MARGIN, y + 24, words, size=12, anchor="start", fill=MUTED)
    return d


def _in_words(whole: Sequence[Work], parts: Sequence[Work]) -> str:
    """Say what the picture shows."""
    ends = [max(work.end for work in works) for works in (parts, whole)]
    return (
        "The model is cut into four stages, one on each rank; activations go from each "
        "to the next one and gradients come back. Below, the same batch twice on one "
        "axis of time. Whole: forward goes down like stairs, from rank 0 to rank 3, "
        "and backward goes up again; each rank waits for "
        f"{idle_share(whole):.0%} of the time. In four microbatches: rank 0 begins "
        "with the next one as soon as it has handed over the first, so the stairs "
        "overlap; each rank waits for "
        f"{idle_share(parts):.0%}, and all is done in {ends[0]:g} instead of "
        f"{ends[1]:g} units."
    )


def _draw_stages(d: Drawing) -> None:
    """Draw the four stages; (0, 0) is the first one's top left corner."""
    for stage, part in enumerate(PARTS):
        x = stage * (STAGE_W + STAGE_GAP)
        name = f"stage {stage} on rank {stage}"
        d.block(x, 0, STAGE_W, STAGE_H, name, part, fill=rank_color(stage), size=12)
        if stage:
            before = x - STAGE_GAP
            d.arrow((before + 6, 13), (x - 6, 13))
            d.arrow((x - 6, 29), (before + 6, 29))
    x = STAGE_W + STAGE_GAP / 2
    d.text(x, -4, "activations", size=11, fill=MUTED)
    d.text(x, STAGE_H + 14, "gradients", size=11, fill=MUTED)


def bubble_curve(
    measured: Mapping[int, Mapping[int, float]],
    formula: Callable[[int, int], float],
    most: int,
) -> Figure:
    """Draw the bubble against the number of microbatches, a curve for each p.

    `measured` maps a number of ranks p to {number of microbatches m: share of time}; a
    p without points is a curve alone. `formula` is called with p and m, for m from 1 to
    `most`. Raises ValueError for what is no share.
    """
    import matplotlib
    from matplotlib import pyplot

    with matplotlib.rc_context():
        style()
        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        ms = range(1, most + 1)
        for p, points in measured.items():
            curve = [100 * float(formula(p, m)) for m in ms]
            axes.plot(ms, curve, color=MUTED, linewidth=1.4)
            axes.annotate(f"p = {p}", (most, curve[-1]), xytext=(6, 0), va="center",
                          textcoords="offset points", fontsize=10)  # fmt: skip
            for m, share in sorted(points.items()):
                if not 0 <= share <= 1:
                    raise ValueError(f"p = {p}, m = {m}: {share} is no share of time")
                axes.plot([m], [100 * share], "o", color=INK, markersize=7)
        axes.plot([], [], "o", color=INK, label="measured")
        axes.plot([], [], color=MUTED, label="formula")
        axes.set(xlabel="microbatches m", ylabel="bubble [% of the ranks' time]")
        axes.set(xlim=(0, most + 0.5), ylim=(0, None))
        axes.grid(axis="y", **GRID)
        axes.legend()
    pyplot.close(figure)
    return figure


IMAGES = {"10_pipeline_parallel.svg": staircase}
