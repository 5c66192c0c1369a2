"""One matrix product on two ranks: by column, by row, and both in turn. Chapter 09."""

from __future__ import annotations

import math

from ddp_course.chapters.ch09_tensor_parallel.matrix_cut import (
    CutPicture,
    CutProduct,
    cut_product,
    in_words,
)
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import MUTED

ROWS, INNER, COLUMNS, RANKS = 4, 4, 8, 2  # small enough to draw every number
MARGIN, LONGEST, TOP, PANEL_GAP, FOOT = 16, 88, 46, 46, 40
SAYS = {
    "column": "By column: each rank computes some columns of Y; nothing is added",
    "row": "By row: each rank computes all of Y, but only a part of the sum",
    "column then row": (
        "By column, then by row: the MLP. The columns of Z are what the rows of B need"
    ),
}


def cut_products() -> Drawing:
    """Draw both ways to cut a matrix product, and an MLP with both. Chapter 09."""
    panels = {
        how: CutPicture(cut_product(ROWS, INNER, COLUMNS, RANKS, how), LONGEST)
        for how in ("column", "row", "column then row")
    }
    wide = max(panel.width for panel in panels.values())
    high = sum(panel.height + PANEL_GAP for panel in panels.values())
    d = Drawing(
        math.ceil(wide + 2 * MARGIN),
        math.ceil(TOP + high + FOOT),
        title="Two ranks share a matrix product",
        description=" ".join(
            f"{SAYS[how]}. {in_words(panel.cut)}" for how, panel in panels.items()
        ),
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    y = float(TOP)
    for how, panel in panels.items():
        d.text(MARGIN, y + 10, SAYS[how], bold=True, anchor="start")
        with d.shifted(MARGIN, y + 24):
            panel.draw(d)
        y += panel.height + PANEL_GAP
    words = (
        "Grey: on all ranks. In colour: on this rank alone. Dashed: not stored here. "
        "Hatched: sent."
    )
    d.text(MARGIN, y + 14, words, size=12, anchor="start", fill=MUTED)
    words = f"Bytes are those that each rank sends: {_sums(panels['row'].cut)}."
    d.text(MARGIN, y + 32, words, size=12, anchor="start", fill=MUTED)
    return d


def _sums(cut: CutProduct) -> str:
    """Explain how the bytes of the all-reduce are computed."""
    (message,) = cut.forward
    y = cut.matrices[-1]
    sent = message.sent(cut.ranks)
    return (
        f"for {y.rows} × {y.columns} numbers of 4 bytes on two ranks 2 · 1/2 · "
        f"{message.nbytes} = {sent}"
    )


IMAGES = {"09_tensor_parallel.svg": cut_products}
