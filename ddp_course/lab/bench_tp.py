"""Figure of `ddp-course bench tp`: ours beside DTensor's, and beside one rank alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ddp_course.lab.bench_marks import (
    CONTROL,
    Mark,
    cases_of,
    draw_marks,
    frame,
    legend_below,
)
from ddp_course.lab.draw.plots import style
from ddp_course.lab.palette import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GLOO, SHARED = -0.22, 0.22  # in a case's line
BESIDE_DTENSOR = (
    Mark("tp gloo", "DTensor default", "gloo, beside default", "o", "white", GLOO),
    Mark("tp gloo", "DTensor best", "gloo, beside best", "o", INK, GLOO,
         {128: 0.6, 1024: 0.8}),
    Mark("tp gloo sequence", "DTensor sequence", "gloo, both cut sequence", "^",
         INK, GLOO),
    Mark("tp shared", "DTensor default", "shared memory, beside default", "s", "white",
         SHARED),
    Mark("tp shared", "DTensor best", "shared memory, beside best", "s", INK, SHARED,
         {128: 0.3}),
    Mark("tp shared sequence", "DTensor sequence", "shared memory, both cut sequence",
         "v", INK, SHARED),
    Mark("DTensor again", "DTensor default", "A/A: DTensor beside itself", "D",
         CONTROL),
    Mark("DTensor patient", "DTensor best", "DTensor, threads interrupt nobody", "x"),
)  # fmt: skip
BESIDE_ONE = (
    Mark("tp gloo", "one rank alone", "gloo, beside one rank", "p", INK, GLOO),
    Mark("tp shared", "one rank alone", "shared memory, beside one rank", "P", INK,
         SHARED),
)  # fmt: skip
PANELS = {
    "over that of DTensor": BESIDE_DTENSOR,
    "over that of one rank alone": BESIDE_ONE,
}


def tp(rows: Iterable[Mapping[str, Any]]) -> Figure:
    """Draw the rows of `ddp-course bench tp`: time of a step over another's, by case.

    On the left beside PyTorch's DTensor as it is (hollow) and at its best (filled),
    gloo above and shared memory below; an upright dash is what is asked for, and the
    A/A control says how much is noise. On the right beside one rank that has the whole
    model: left of 1, cutting it was worth it. Raises ValueError for no rows. Chapter
    09.
    """
    import matplotlib
    from matplotlib import pyplot

    rows = list(rows)
    cases = cases_of(rows)
    with matplotlib.rc_context():
        style()
        size = (11.5, 2.6 + 0.52 * max(2, len(cases)))
        figure, panels = pyplot.subplots(1, 2, figsize=size, layout="constrained")
        for axes, (title, marks) in zip(panels, PANELS.items(), strict=True):
            draw_marks(axes, rows, marks, cases)
            axes.set_title(f"time of a step {title}", fontsize=11)
            frame(axes, cases, named=axes is panels[0])
        legend_below(figure)
    pyplot.close(figure)
    return figure
