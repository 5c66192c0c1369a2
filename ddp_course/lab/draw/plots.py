"""Figures of measured data, drawn with matplotlib, which is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_course.lab.palette import INK, MUTED, RANK_COLORS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The curves differ in width, grey and dashes, so that one which lies exactly on another
# leaves both to be seen. Grey to black: colours are for ranks.
CURVES = (
    {"color": "#C3C9D1", "linewidth": 7.0, "linestyle": "-"},
    {"color": INK, "linewidth": 1.6, "linestyle": (0, (4, 3))},
    {"color": MUTED, "linewidth": 3.4, "linestyle": (0, (1, 2))},
)
MIB = 2**20
GRID = {"color": "#E3E6EA", "linewidth": 0.8}


def style() -> None:
    """Give all later matplotlib figures the course's look.

    Rank r is drawn in colour `C{r}`, and an SVG has the same bytes on every run.
    """
    import matplotlib
    from cycler import cycler

    matplotlib.rcParams.update(
        {
            "axes.prop_cycle": cycler(color=RANK_COLORS),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "figure.facecolor": "white",  # also in a dark theme
            "figure.figsize": (7, 3.2),
            "figure.dpi": 100,
            "font.family": "DejaVu Sans",  # comes with matplotlib
            "font.size": 11,
            "legend.frameon": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "ddp-course",
        }
    )


def plot_losses(
    curves: Mapping[str, Sequence[float]], *, ylabel: str = "loss [nats per character]"
) -> Figure:
    """Draw loss curves on top of each other: name -> the loss of every step.

    Raises ValueError for no curve, more than three, or one without values.
    """
    import matplotlib
    from matplotlib import pyplot

    if not 1 <= len(curves) <= len(CURVES):
        raise ValueError(f"{len(curves)} curves; 1 to {len(CURVES)} can be told apart")
    empty = [name for name, losses in curves.items() if len(losses) == 0]
    if empty:
        raise ValueError(f"the curve {empty[0]!r} has no values")
    with matplotlib.rc_context():
        style()
        figure, axes = pyplot.subplots(layout="constrained")
        for order, (name, losses) in enumerate(curves.items()):
            values = [float(loss) for loss in losses]
            axes.plot(values, label=name, **CURVES[order])
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(handlelength=4)
    pyplot.close(figure)  # or a notebook would show it twice
    return figure
