"""The figures of chapter 19: lost time, loss curves, saves, digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_course.chapters.ch19_failures.batches import BATCH, ROWS, Curve
from ddp_course.chapters.ch19_failures.half_day import half_day
from ddp_course.chapters.ch19_failures.saves import SavedRun
from ddp_course.failures.digests import suspects
from ddp_course.failures.interval import daly, expected_time
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.plots import GRID, LOOKS, Drawn, canvas, plot
from ddp_course.lab.palette import (
    INK,
    MUTED,
    PANEL,
    PANEL_EDGE,
    RANK_COLORS,
    WHOLE,
    rank_color,
)

# ---- lost time over the checkpoint interval ------------------------------------------


@plot
def lost_time(measured: Mapping[float, float], save: float, mean: float) -> Drawn:
    """Draw lost time against the interval: the formula, and measured points.

    `measured` maps an interval to the seconds per second of work; intervals, `save`
    and `mean` are in seconds.
    """
    figure, axes = canvas((7, 3.4))
    best = daly(save, mean)
    factors = [2 ** (k / 8) for k in range(-20, 21)]
    lost = [100 * (expected_time(best * f, save, mean) - 1) for f in factors]
    axes.plot(factors, lost, color=INK, label="expected")
    points = [(work / best, 100 * (times - 1)) for work, times in measured.items()]
    axes.plot(*zip(*points, strict=True), "o", color=INK, label="ranks killed")
    axes.set(xscale="log", xlabel="work between saves, over Daly's interval")
    axes.set_xticks([1 / 4, 1 / 2, 1, 2, 4], ["¼", "½", "1", "2", "4"])
    axes.minorticks_off()
    axes.set(ylabel="lost time [% of work]", ylim=(0, None))
    axes.grid(axis="y", **GRID)
    axes.legend()
    words = "; ".join(f"{x:g} times Daly's: {percent:.0f} %" for x, percent in points)
    return figure, f"Lost time against the checkpoint interval. Measured: {words}."


# ---- loss curves after an incomplete checkpoint --------------------------------------


@plot
def betrayed(curves: Mapping[str, Sequence[float]]) -> Drawn:
    """Draw the losses of runs resumed from checkpoints in which one part is missing.

    `curves` is from `contents.resumed`. The right column shows each run's difference
    from the run that was not interrupted.
    """
    names = [name for name in curves if name not in ("whole", "nothing")]
    figure, rows = canvas((7.5, 6.4), nrows=len(names), ncols=2, sharex=True)
    whole, words = curves["whole"], []
    steps = range(1, len(whole) + 1)
    for (left, right), name in zip(rows, names, strict=True):
        differ = [a - b for a, b in zip(curves[name], whole, strict=True)]
        left.plot(steps, whole, color=MUTED, linewidth=4, alpha=0.5)
        left.plot(steps, curves[name], color=INK, linewidth=1.3)
        left.set_title(f"without the {name}", loc="left", fontsize=11, pad=2)
        left.set_ylim(0.5, 5)
        right.axhline(0, color=MUTED, linewidth=4, alpha=0.5)
        right.plot(steps, differ, color=INK, linewidth=1.3)
        for axes in (left, right):
            axes.grid(**GRID)
        first = next((k for k, d in enumerate(differ, 1) if d), None)
        most = max(differ, key=abs)
        words.append(f"{name}: from step {first}, by up to {most:+.2f}")
    rows[0, 1].set_title("difference", loc="left", fontsize=11, pad=2)
    rows[len(names) // 2, 0].set_ylabel("loss (grey: not interrupted)")
    for axes in rows[-1]:
        axes.set_xlabel("steps after resuming")
    return figure, f"Losses after resuming, beside the whole run's. {'; '.join(words)}."


# ---- a step with a save --------------------------------------------------------------


@plot
def saved(runs: Mapping[str, SavedRun]) -> Drawn:
    """Draw when each run computes, waits for a save, and writes a file."""
    figure, axes = canvas((7, 0.9 + 0.8 * len(runs)))
    words = []
    for row, (name, run) in enumerate(runs.items()):
        origin = run.steps[0][0]
        for spans, at, look in (
            (run.steps, row, {"facecolor": PANEL}),
            (run.blocked, row, {"facecolor": RANK_COLORS[5]}),
            (run.written, row + 0.38, {"facecolor": "white", "hatch": "///"}),
        ):
            bars = [(start - origin, end - start) for start, end in spans]
            axes.broken_barh(bars, (at - 0.17, 0.34), edgecolor=INK, lw=0.6, **look)
        words.append(f"{name}: a step loses {1000 * run.lost:.0f} ms")
    axes.set(yticks=range(len(runs)), yticklabels=list(runs), xlabel="seconds")
    axes.invert_yaxis()
    about = "grey: computes, orange: waits for the save, hatched: a thread writes"
    axes.set_title(about, fontsize=10, loc="left")
    return figure, f"Steps and saves over time; {about}. {', '.join(words)}."


# ---- other batches and learning rates ------------------------------------------------


@plot
def loss_over_rows(curves: Mapping[str, Curve]) -> Drawn:
    """Draw losses over the rows used; the number of ranks grows halfway."""
    figure, axes = canvas((6.5, 3.4))
    for (name, curve), look in zip(curves.items(), LOOKS, strict=False):
        axes.plot(*zip(*curve, strict=True), label=name, **look)
    axes.axvline(ROWS // 2, color=MUTED, linewidth=1)
    axes.set(xlabel=f"rows used (at first {BATCH} per step)", ylabel="loss of all rows")
    axes.set_yscale("log")
    axes.grid(**GRID)
    axes.legend()
    ends = ", ".join(f"{name}: {curve[-1][1]:.2f}" for name, curve in curves.items())
    return (
        figure,
        f"Loss over rows; the ranks grow fourfold half way. In the end {ends}.",
    )


# ---- digests -------------------------------------------------------------------------

CELL_W, CELL_H, NAMES_W = 44, 20, 190


def digest_table(runs: Mapping[str, Mapping[int, Sequence[int]]]) -> Drawing:
    """Draw which ranks agree in each comparison: {fault: {step: digests of ranks}}."""
    ranks = len(next(iter(next(iter(runs.values())).values())))
    steps = [*next(iter(runs.values()))]
    found = {
        fault: [(rank, step) for step in rows for rank in suspects(rows[step]) or ()]
        for fault, rows in runs.items()
    }
    words = "; ".join(
        f"{fault}: rank {pairs[0][0]} from step {pairs[0][1]} on" if pairs
        else f"{fault}: none"
        for fault, pairs in found.items()
    )  # fmt: skip
    block = ranks * CELL_H + 16
    d = Drawing(
        NAMES_W + CELL_W * len(steps) + 20,
        56 + block * len(runs),
        title="Digests of replicas, compared",
        description=f"Ranks that differ from the majority. {words}.",
    )
    d.text(NAMES_W - 10, 34, "before step", size=12, anchor="end", fill=MUTED)
    for column, step in enumerate(steps):
        d.text(NAMES_W + CELL_W * (column + 0.5), 34, str(step), size=12)
    for k, fault in enumerate(runs):
        top = 46 + k * block
        d.text(12, top + CELL_H * ranks / 2 + 4, fault, size=13, anchor="start")
        for rank in range(ranks):
            y = top + rank * CELL_H
            d.text(NAMES_W - 10, y + 14, f"rank {rank}", size=11, anchor="end")
            for column, step in enumerate(steps):
                x = NAMES_W + column * CELL_W
                if (rank, step) in found[fault]:
                    fill = rank_color(rank)
                    d.block(x, y, CELL_W, CELL_H, "≠", fill=fill, radius=0)
                else:
                    look = {"fill": WHOLE, "stroke": PANEL_EDGE}
                    d.rect(x, y, CELL_W, CELL_H, **look)
                if suspects(runs[fault][step]) is None:
                    d.text(x + CELL_W / 2, y + 14, "?", size=12)
    return d


IMAGES = {"19_failures.svg": half_day}
