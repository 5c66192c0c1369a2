"""Figures of what the meters of chapters 02 and 03 recorded: times and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_course.lab.draw.plots import style
from ddp_course.lab.palette import INK, MUTED, PANEL_EDGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GIB, MS = 2**30, 1e3
# Colours are for ranks: algorithms differ in marker and dashes. The first two looks are
# for the fastest of ours and for gloo, which stand out from the others.
FASTEST = {"color": INK, "linewidth": 2.6, "marker": "o", "linestyle": "-", "zorder": 4}
GLOO = {
    "color": INK, "linewidth": 1.8, "linestyle": (0, (4, 2)), "zorder": 3,
    "marker": "s", "markerfacecolor": "white", "markersize": 7,
}  # fmt: skip
OTHERS = [
    {"color": "#7A828D", "linewidth": 1.3, "marker": marker, "linestyle": dashes}
    for marker, dashes in zip(
        "^vD*XP<>", ["-", (0, (1, 1.5)), "--", "-."] * 2, strict=True
    )
]


def plot_sizes(
    curves: Mapping[str, Mapping[int, float]],
    limits: Mapping[str, float] | None = None,
    busbw_factor: float = 1.0,
) -> Figure:
    """Draw time and bus bandwidth against the size of the tensor, for each algorithm.

    `curves` maps a name to {bytes: seconds}. A name with "gloo" in it is drawn dashed,
    and of the others the one which is fastest at the largest size is drawn bold.
    `limits` are bandwidths in bytes per second, drawn as horizontal lines.
    `busbw_factor` is that of `theory.bus_factor`. Raises ValueError for too few
    or too many curves, and for what is not above 0.
    """
    import matplotlib
    from matplotlib import pyplot

    limits = dict(limits or {})
    _check_curves(curves)
    for name, limit in {"busbw_factor": busbw_factor, **limits}.items():
        _check_positive(name, limit)
    looks = _looks(curves)
    with matplotlib.rc_context():
        style()
        figure, panels = pyplot.subplots(1, 2, figsize=(10.5, 4), layout="constrained")
        ends: list[dict[str, tuple[float, float]]] = [{}, {}]
        for name, times in curves.items():
            sizes = sorted(times)
            seconds = [times[size] for size in sizes]
            rates = [
                n * busbw_factor / s / GIB for n, s in zip(sizes, seconds, strict=True)
            ]
            for axes, ys, end in zip(
                panels, ([s * MS for s in seconds], rates), ends, strict=True
            ):
                axes.plot(sizes, ys, label=name, **looks[name])
                end[name] = sizes[-1], ys[-1]
        every = [size for times in curves.values() for size in times]
        for axes, label in zip(
            panels, ("time [ms]", "bus bandwidth [GiB/s]"), strict=True
        ):
            axes.set_ylabel(label)
            log_log(axes, every)
        _draw_limits(panels[1], limits)
        for axes, end in zip(panels, ends, strict=True):
            _label_ends(axes, end)
    pyplot.close(figure)
    return figure


def _looks(curves: Mapping[str, Mapping[int, float]]) -> dict[str, dict]:
    """Choose how each curve is drawn."""
    ours = [name for name in curves if "gloo" not in name.lower()]
    fastest = min(ours, key=lambda n: _rate(curves[n]), default=None)
    others = iter(OTHERS)
    return {
        name: FASTEST if name == fastest else GLOO if name not in ours else next(others)
        for name in curves
    }


def _rate(times: Mapping[int, float]) -> tuple[int, float]:
    return -max(times), times[max(times)]


def _check_curves(curves: Mapping[str, Mapping[int, float]]) -> None:
    gloo = sum("gloo" in name.lower() for name in curves)
    most = len(OTHERS) + 1 + gloo
    if not 1 <= len(curves) <= most or gloo > 1:
        raise ValueError(
            f"{len(curves)} curves, {gloo} of gloo; 1 to {len(OTHERS) + 1} and one of "
            "gloo can be told apart"
        )
    for name, times in curves.items():
        if not times:
            raise ValueError(f"the curve {name!r} has no values")
        for size, seconds in times.items():
            _check_positive(f"a size of {name!r}", size)
            _check_positive(f"the time of {name!r} at {size_name(size)}", seconds)


def _check_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be above 0 and finite")


def size_name(nbytes: float) -> str:
    """Write a number of bytes as B, KiB, MiB or GiB: 65536 is "64 KiB"."""
    power = min(3, max(0, int(math.log2(max(nbytes, 1)) // 10)))
    return f"{nbytes / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def log_log(axes: Axes, sizes: Sequence[float]) -> None:
    """Make both axes logarithmic: x in powers of two with units, y in plain numbers."""
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
    axes.set_xlabel("size of the tensor")
    axes.grid(axis="y", color="#E3E6EA", linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_limits(axes: Axes, limits: Mapping[str, float]) -> None:
    """Draw each limit as a line with its name; the lowest has it below the line."""
    lowest = min(limits.values(), default=0)
    for name, limit in limits.items():
        axes.axhline(limit / GIB, color=MUTED, linewidth=1.2, linestyle=(0, (6, 3)))
        under = limit == lowest and len(limits) > 1
        axes.annotate(
            name,
            (0.02, limit / GIB),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, -3 if under else 3),
            textcoords="offset points",
            va="top" if under else "bottom",
            fontsize=9,
            color=MUTED,
        )
    if limits:
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, max(top, 1.6 * max(limits.values()) / GIB))


def _label_ends(axes: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """Write each curve's name to the right of its end, moved apart where needed."""
    bottom, top = map(math.log, axes.get_ylim())
    axes.set_ylim(*axes.get_ylim())  # stay as it is
    step = 0.068
    heights = {n: (math.log(y) - bottom) / (top - bottom) for n, (_, y) in ends.items()}
    order = sorted(ends, key=lambda name: heights[name])
    places: list[float] = []
    for name in order:
        least = places[-1] + step if places else 0.0
        places.append(max(heights[name], least))
    for i in reversed(range(len(places))):  # not above the top
        places[i] = min(places[i], 1 - step * (len(places) - 1 - i))
    for name, place in zip(order, places, strict=True):
        axes.annotate(
            name,
            ends[name],
            xytext=(1.07, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": PANEL_EDGE, "linewidth": 0.8,
                        "shrinkA": 1, "shrinkB": 4},
        )  # fmt: skip


def plot_fit(
    sizes: Sequence[float], seconds: Sequence[float], line: Callable[[float], float]
) -> Figure:
    """Draw measured times against sizes, and the time in s that a model `line` gives.

    Raises ValueError unless there are as many sizes as times, all above 0.
    """
    import matplotlib
    from matplotlib import pyplot

    if len(sizes) != len(seconds) or not len(sizes):
        raise ValueError(
            f"{len(sizes)} sizes, {len(seconds)} times; must be as many, at least one"
        )
    for size, time in zip(sizes, seconds, strict=True):
        _check_positive("a size", size)
        _check_positive(f"the time of {size_name(size)}", time)
    low, high = min(sizes), max(sizes)
    grid = [low * (high / low) ** (k / 100) for k in range(101)]
    with matplotlib.rc_context():
        style()
        figure, axes = pyplot.subplots(layout="constrained")
        model = [line(size) * MS for size in grid]
        axes.plot(grid, model, color=INK, linewidth=1.6, label="model: α + β × bytes")
        look = {"color": MUTED, "marker": "o", "linestyle": "", "fillstyle": "none"}
        axes.plot(sizes, [s * MS for s in seconds], label="measured", **look)
        axes.set_ylabel("time [ms]")
        log_log(axes, sizes)
        axes.set_xlabel("size of the message")
        axes.legend(loc="upper left")
    pyplot.close(figure)
    return figure
