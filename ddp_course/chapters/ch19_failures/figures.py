"""The figures of chapter 19: lost time, loss curves, saves, digests."""

from __future__ import annotations

from collections.abc import Mapping

from ddp_course.chapters.ch19_failures.batches import BATCH, ROWS, Curve
from ddp_course.lab.draw.plots import GRID, LOOKS, Drawn, canvas, plot
from ddp_course.lab.palette import MUTED

# ---- lost time over the checkpoint interval ------------------------------------------


# ---- loss curves after an incomplete checkpoint --------------------------------------


# ---- a step with a save --------------------------------------------------------------


# ---- other batches and learning rates ------------------------------------------------


@plot
def loss_over_rows(curves: Mapping[str, Curve]) -> Drawn:
    """Draw losses over the rows used; the number of ranks grows half way."""
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
