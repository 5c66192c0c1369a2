"""A model cut into stages, a batch into microbatches, and how the bubble shrinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import draw_runs
from ddp_course.lab.draw.pipeline_timeline import idle_share, run_of, works_of
from ddp_course.lab.draw.plots import GRID, Drawn, canvas, plot
from ddp_course.lab.draw.schedule_view import named
from ddp_course.lab.palette import INK, MUTED, rank_color
from ddp_course.pipeline.simulate import Costs, simulate_schedule

STAGES, MICROBATCHES = 4, 4
PARTS = ("embed, block 0", "block 1", "block 2", "block 3, head")
STAGE_W, STAGE_H, STAGE_GAP = 132, 40, 44


def staircase() -> Drawing:
    """Draw a model on four ranks, and a batch that passes it whole, and in four parts.

    Both drawings share an axis: a stage needs the same time for a whole batch as for
    its four microbatches. Chapter 10.
    """
    times = Costs(*[MICROBATCHES] * 3)  # F, I and W of a whole batch
    whole = works_of(simulate_schedule(named("naive", STAGES, 1), times).events)
    whole = [replace(work, microbatch=None) for work in whole]
    parts = works_of(simulate_schedule(named("gpipe", STAGES, MICROBATCHES)).events)
    long = max(work.end for work in whole)
    waiting = f"at any time {STAGES - 1} of {STAGES} ranks wait"
    follows = f"The same batch in {MICROBATCHES} microbatches: the next one follows"
    titles = {f"The whole batch at once: {waiting}": whole, follows: parts}
    runs = [
        run_of(works, long, title, f"waiting: {idle_share(works):.0%}")
        for title, works in titles.items()
    ]
    return draw_runs(
        "Stages of a model, and microbatches of a batch",
        runs,
        "time [one microbatch forward through one stage = 1]",
        long,
        head=(STAGE_H + 50, _draw_stages),
        foot="Solid: forward. Lighter: backward, twice as long. Dashed: a rank waits. "
        "Numbers are microbatches.",
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


@plot
def bubble_curve(
    measured: Mapping[int, Mapping[int, float]],
    formula: Callable[[int, int], float],
    most: int,
) -> Drawn:
    """Draw the bubble against the number of microbatches, a curve for each p.

    `measured` maps a number of ranks p to {number of microbatches m: share of time}; an
    empty dictionary yields only a curve. `formula` is called with p and m, for m from 1
    to `most`. Raises ValueError for a share outside 0 to 1.
    """
    for p, points in measured.items():
        for m, share in points.items():
            if not 0 <= share <= 1:
                raise ValueError(f"p = {p}, m = {m}: share {share} is not in 0 to 1")
    figure, axes = canvas((7, 3.6))
    ms = range(1, most + 1)
    for p, points in measured.items():
        curve = [100 * float(formula(p, m)) for m in ms]
        axes.plot(ms, curve, color=MUTED, linewidth=1.4)
        axes.annotate(f"p = {p}", (most, curve[-1]), xytext=(6, 0), va="center",
                      textcoords="offset points", fontsize=10)  # fmt: skip
        for m, share in sorted(points.items()):
            axes.plot([m], [100 * share], "o", color=INK, markersize=7)
    axes.plot([], [], "o", color=INK, label="measured")
    axes.plot([], [], color=MUTED, label="formula")
    axes.set(xlabel="microbatches m", ylabel="bubble [% of the ranks' time]")
    axes.set(xlim=(0, most + 0.5), ylim=(0, None))
    axes.grid(axis="y", **GRID)
    axes.legend()
    texts = [
        f"p = {p}, m = {m}: {share:.0%} (formula: {float(formula(p, m)):.0%})"
        for p, points in measured.items()
        for m, share in points.items()
    ]
    return figure, f"The bubble against the number of microbatches. {'; '.join(texts)}."


IMAGES = {"10_pipeline_parallel.svg": staircase}
