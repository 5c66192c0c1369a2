"""A figure of the bytes that each rank sent, measured and by theory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ddp_course.lab.draw.plots import GRID, Drawn, canvas, draw_mark, name_below, plot
from ddp_course.lab.palette import INK, WHOLE, darker, rank_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@plot
def plot_bytes(
    measured: Mapping[str, Sequence[float]], theory: Mapping[str, Sequence[float]]
) -> Drawn:
    """Draw what each rank sent, in units of S, the whole tensor, and theory as marks.

    Both arguments map an algorithm to a value for each rank. Raises ValueError unless
    they have the same algorithms, and the same number of ranks for each.
    """
    _check_bytes(measured, theory)
    bars = sum(map(len, measured.values())) + len(measured)
    places, x = {}, 0
    for name, values in measured.items():
        places[name] = range(x, x + len(values))
        x += len(values) + 1
    size = (max(4.5, 1.2 + 0.36 * bars), 3.4)
    figure, axes = canvas(size)
    for name, xs in places.items():
        colors = [rank_color(rank) for rank in range(len(xs))]
        edges = [darker(color) for color in colors]
        axes.bar(xs, [*map(float, measured[name])], 0.86, color=colors, ec=edges)
        for x, value in zip(xs, theory[name], strict=True):
            draw_mark(axes, x, float(value), 0.5)
        name_below(axes, name.replace(", ", ",\n"), xs)
    axes.plot([], [], color=INK, linewidth=2.4, label="theory")
    axes.bar([0], [0], color=WHOLE, ec=darker(WHOLE), label="measured")
    _label_ranks(axes, places)
    words = [
        f"{name}: {_list(values)} (theory: {_list(theory[name])})."
        for name, values in measured.items()
    ]
    return figure, f"Sent by each rank, in whole tensors S. {' '.join(words)}"


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{float(value):.3g}" for value in values)


def _label_ranks(axes: Axes, places: Mapping[str, range]) -> None:
    axes.set_xticks(
        [x for xs in places.values() for x in xs],
        [f"{rank}" for xs in places.values() for rank in range(len(xs))],
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("sent by each rank [S]")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.02)
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


def _check_bytes(
    measured: Mapping[str, Sequence[float]], theory: Mapping[str, Sequence[float]]
) -> None:
    if not measured or set(measured) != set(theory):
        raise ValueError(
            f"measured has the algorithms {sorted(measured)}, theory {sorted(theory)}; "
            "both must have the same, at least one"
        )
    for name, values in measured.items():
        if not len(values) or len(values) != len(theory[name]):
            raise ValueError(
                f"{name!r} has {len(values)} measured values, {len(theory[name])} of "
                "theory; pass one of each for every rank"
            )
