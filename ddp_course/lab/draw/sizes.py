"""A figure of a fit: measured times against sizes, and the model's line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddp_course.lab.draw.memory import unit_of
from ddp_course.lab.draw.plots import GRID, Drawn, canvas, plot
from ddp_course.lab.palette import INK, MUTED
from ddp_course.theory.checks import check_positive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MS = 1e3


def size_name(nbytes: float) -> str:
    """Format a number of bytes in B, KiB, MiB or GiB: 65536 is "64 KiB"."""
    unit, size = unit_of(nbytes)
    return f"{nbytes / size:.3g} {unit}"


def log_log(axes: Axes, sizes: Sequence[float]) -> None:
    """Set logarithmic axes: x with powers of two and units, y with plain numbers."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    low, high = math.log2(min(sizes)), math.log2(max(sizes))
    every = max(1, math.ceil((high - low) / 5))
    ticks = [2.0**power for power in range(math.ceil(low), math.floor(high) + 1, every)]
    axes.xaxis.set_major_locator(FixedLocator(ticks or [min(sizes)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_name(value)))
    axes.xaxis.set_minor_locator(FixedLocator([]))
    bottom, top = axes.get_ylim()
    narrow = top / bottom < 200
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)


@plot
def plot_fit(
    sizes: Sequence[float], seconds: Sequence[float], line: Callable[[float], float]
) -> Drawn:
    """Draw measured times against sizes, and a model: `line(bytes)` in seconds.

    Raises ValueError unless there are as many sizes as times, all above 0.
    """
    if len(sizes) != len(seconds) or not len(sizes):
        raise ValueError(
            f"there are {len(sizes)} sizes and {len(seconds)} times; pass as many of "
            "both, at least one"
        )
    for size, time in zip(sizes, seconds, strict=True):
        check_positive("a size", size)
        check_positive(f"the time of {size_name(size)}", time)
    low, high = min(sizes), max(sizes)
    grid = [low * (high / low) ** (k / 100) for k in range(101)]
    figure, axes = canvas()
    model = [line(size) * MS for size in grid]
    axes.plot(grid, model, color=INK, linewidth=1.6, label="model: α + β × bytes")
    look = {"color": MUTED, "marker": "o", "linestyle": "", "fillstyle": "none"}
    axes.plot(sizes, [s * MS for s in seconds], label="measured", **look)
    axes.set_ylabel("time [ms]")
    log_log(axes, sizes)
    axes.set_xlabel("size of the message")
    figure.legend(loc="outside upper left", ncols=2)  # points may lie anywhere
    points = zip(sizes, seconds, strict=True)
    texts = [f"{size_name(n)}: {s * MS:.3g} ms ({line(n) * MS:.3g})" for n, s in points]
    words = f"Time against size, measured (and of the model). {', '.join(texts)}."
    return figure, words
