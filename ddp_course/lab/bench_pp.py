"""Figure of `ddp-course bench pp`: pipelines beside PyTorch's, times and bubbles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ddp_course.lab.bench_marks import (
    CONTROL,
    Mark,
    cases_of,
    draw_marks,
    frame,
)
from ddp_course.lab.draw.bubbles import Row, checked_rows, draw_bubbles
from ddp_course.lab.draw.plots import GRID, style
from ddp_course.lab.palette import INK

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ONE_F = "Schedule1F1B"
MARKS = (
    Mark("gpipe gloo", "ScheduleGPipe", "GPipe", "s", "white", -0.3),
    Mark("1f1b gloo", ONE_F, "1F1B", "o", INK, -0.1, {128: 1.05, 1024: 1.05}),
    Mark("interleaved gloo", "ScheduleInterleaved1F1B", "interleaved", "^", "white",
         0.1),
    Mark("zero_bubble gloo", "ScheduleInterleavedZeroBubble", "zero bubble", "v", INK,
         0.3),
    Mark(f"{ONE_F} again", ONE_F, "A/A: PyTorch's 1F1B beside itself", "D", CONTROL),
)  # fmt: skip
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved",
    "zero_bubble": "zero\nbubble",
}
FORMULA = "what it asks for"


def pp(rows: Iterable[Mapping[str, Any]]) -> Figure:
    """Draw the rows of `ddp-course bench pp`: times, and for 2 and 4 ranks the bubbles.

    On the left the time of a step over that of PyTorch's same schedule, a line for each
    case; an upright dash is what is asked for, and the A/A control says how much is
    noise. Beside it the share of time in which layers that only wait are waited for:
    ours, PyTorch's, and what the schedule asks for. Raises ValueError for no rows.
    Chapters 10 and 11.
    """
    import matplotlib
    from matplotlib import pyplot

    rows = list(rows)
    timed = [row for row in rows if "paired" in row]
    cases, shares = cases_of(timed), shares_of(rows)
    with matplotlib.rc_context():
        style()
        size = (6.4 + 3.9 * len(shares), 2.4 + 0.5 * max(4, len(cases)))
        figure, panels = pyplot.subplots(
            1, 1 + len(shares), figsize=size, layout="constrained", squeeze=False,
            width_ratios=[1.2] + [1] * len(shares),
        )  # fmt: skip
        times, *others = panels[0]
        draw_marks(times, timed, MARKS, cases)
        times.set_title("time of a step over that of PyTorch's", fontsize=11)
        frame(times, cases)
        times.xaxis.get_major_locator().set_params(nbins=5)
        for axes, (ranks, bubbles) in zip(others, shares.items(), strict=True):
            draw_bubbles(axes, bubbles)
            axes.set_title(f"bubble, {ranks} ranks whose layers wait", fontsize=11)
            axes.tick_params(axis="x", labelsize=9)
            axes.grid(axis="y", **GRID)
            axes.set_axisbelow(True)
        legend = {}
        for axes in panels[0]:
            legend |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        figure.legend(legend.values(), legend.keys(), loc="outside lower center",
                      ncols=3)  # fmt: skip
    pyplot.close(figure)
    return figure


def shares_of(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[Row]]:
    """Return for each number of ranks (schedule, ours, formula, PyTorch's)."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row["metric"] == "share":
            of_ranks = found.setdefault(row["ranks"], {})
            share = of_ranks.setdefault(row["schedule"], {"ours": row["ours"]})
            whose = "formula" if row["beside"] == FORMULA else "theirs"
            share[whose] = row["theirs"]
    return {
        ranks: checked_rows(
            (NAMES[name], share["ours"], share["formula"], share["theirs"])
            for name, share in of_ranks.items()
        )
        for ranks, of_ranks in found.items()
    }
