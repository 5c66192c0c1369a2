"""Figures of measured data, drawn with matplotlib, which is imported on first use."""

from __future__ import annotations

import base64
import functools
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_course.lab.draw.drawing import picture
from ddp_course.lab.palette import INK, MUTED, RANK_COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The first figure ever searches for fonts; on a slow machine matplotlib warns of it.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

# Widths, greys and dashes differ, so that two equal curves are both visible. Colours
# stand for ranks.
CURVES = (
    {"color": "#C3C9D1", "linewidth": 7.0, "linestyle": "-"},
    {"color": INK, "linewidth": 1.6, "linestyle": (0, (4, 3))},
    {"color": MUTED, "linewidth": 3.4, "linestyle": (0, (1, 2))},
)
LOOKS = (  # grey, since colours stand for ranks
    {"color": "#C3C9D1", "linewidth": 6.0},
    {"color": INK, "linewidth": 1.5},
    {"color": MUTED, "linewidth": 2.6, "linestyle": (0, (1, 1.5))},
    {"color": INK, "linewidth": 1.5, "linestyle": (0, (5, 3))},
)
GRID = {"color": "#E3E6EA", "linewidth": 0.8}
Drawn = tuple["Figure", str]  # a plot, and its alternative text


def style() -> None:
    """Set the course's look for all later matplotlib figures.

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
            "hatch.linewidth": 0.8,
            "legend.frameon": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "ddp-course",
        }
    )


def canvas(size: tuple[float, float] | None = None, **more: Any) -> tuple[Figure, Any]:
    """Return a figure of `size` in inches, and its axes; `more` goes to `subplots`."""
    from matplotlib import pyplot

    return pyplot.subplots(figsize=size, layout="constrained", **more)


def plot(draw: Callable[..., Drawn]) -> Callable[..., Figure]:
    """Decorate a function that returns a figure and its alternative text.

    The decorated function draws in the course's look, and returns the figure alone. A
    notebook shows it once, with the alternative text.
    """

    @functools.wraps(draw)
    def drawn(*args: Any, **options: Any) -> Figure:
        import matplotlib
        from matplotlib import pyplot

        with matplotlib.rc_context():
            style()
            figure, words = draw(*args, **options)
        pyplot.close(figure)  # else a notebook would show it twice
        figure._ipython_display_ = functools.partial(_show, figure, words)
        return figure

    return drawn


def _show(figure: Figure, words: str) -> None:
    from IPython.display import display
    from PIL import Image  # comes with matplotlib

    drawn, image = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    few = Image.open(drawn).convert("RGB").quantize(256)  # a third of the bytes
    few.save(image, format="png", optimize=True)
    data = base64.b64encode(image.getvalue()).decode()
    html = picture(f"image/png;base64,{data}", words)
    display({"text/plain": repr(figure), "text/html": html}, raw=True)


def draw_mark(axes: Axes, x: float, y: float, half: float) -> None:
    """Draw theory's value: a short line across `x` with an edge, visible on black."""
    for color, width in (("white", 4.8), (INK, 2.3)):
        axes.plot([x - half, x + half], [y, y], color=color, linewidth=width)


def name_below(axes: Axes, name: str, xs: Sequence[float]) -> None:
    """Write a name below the axis and the ranks' numbers, centred over `xs`."""
    at = (xs[0] + xs[-1]) / 2, 0
    look = {"textcoords": "offset points", "ha": "center", "va": "top"}
    across = axes.get_xaxis_transform()
    axes.annotate(name, at, xycoords=across, xytext=(0, -23), **look)


@plot
def plot_losses(
    curves: Mapping[str, Sequence[float]],
    *,
    ylabel: str = "loss [nats per character]",
    every: int = 1,
) -> Drawn:
    """Draw loss curves on top of each other: {name: the loss of every step}.

    With `every`, the values belong to steps `every`, 2 * `every` and so on. Raises
    ValueError unless there are one to three curves, each with values.
    """
    if not 1 <= len(curves) <= len(CURVES):
        raise ValueError(
            f"there are {len(curves)} curves; 1 to {len(CURVES)} can be told apart"
        )
    empty = [name for name, losses in curves.items() if len(losses) == 0]
    if empty:
        raise ValueError(f"the curve {empty[0]!r} has no values; pass one or more")
    figure, axes = canvas()
    words = [f"Curves of the {ylabel.partition(' [')[0]} against the step."]
    for order, (name, losses) in enumerate(curves.items()):
        values = [float(loss) for loss in losses]
        last = every * len(values)
        at = range(len(values)) if every == 1 else range(every, last + 1, every)
        axes.plot(at, values, label=name, **CURVES[order])
        steps = f"{last} step{'s' * (last > 1)}"
        words.append(f"{name}: from {values[0]:.3g} to {values[-1]:.3g} in {steps}.")
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(handlelength=4)
    return figure, " ".join(words)


@plot
def curves(
    formulas: Mapping[str, Sequence[tuple[float, float]]],
    measured: Mapping[str, Sequence[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
) -> Drawn:
    """Draw a line for each formula, and measured points.

    Both arguments map a name to (x, y) pairs; measured points have the name of a
    formula. Raises ValueError for points without a formula, and unless there are one to
    four formulas.
    """
    if not 1 <= len(formulas) <= len(LOOKS) or measured.keys() - formulas.keys():
        raise ValueError(
            f"formulas are {list(formulas)}, and measured points {list(measured)}; "
            f"there must be 1 to {len(LOOKS)} formulas, and one for each set of points"
        )
    figure, axes = canvas((7, 3.4))
    texts = []
    for look, (name, pairs) in zip(LOOKS, formulas.items(), strict=False):
        axes.plot(*zip(*pairs, strict=True), label=name, **look)
        for x, y in measured.get(name, ()):
            axes.plot([x], [y], "o", color=INK, markersize=6)
            texts.append(f"{name}, at {x:g}: {y:.3g}")
    if texts:
        axes.plot([], [], "o", color=INK, label="measured")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.set_ylim(0, None)
    axes.grid(axis="y", **GRID)
    axes.legend(handlelength=3)
    texts = [f"Measured: {'; '.join(texts)}."] if texts else [*formulas]
    return figure, f"{ylabel} against {xlabel}. {', '.join(texts)}"
