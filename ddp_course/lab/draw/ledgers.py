"""Figures of memory: ledgers side by side, and stored bytes against sent bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_course.lab.draw.kinds import KIND_LOOKS, kinds_among
from ddp_course.lab.draw.memory import STACK, samples_of, total_of, unit_of
from ddp_course.lab.draw.plots import GRID, Drawn, canvas, draw_mark, name_below, plot
from ddp_course.lab.palette import INK, MUTED, darker, rank_color, text_color
from ddp_course.theory.checks import check_positive

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR = 0.86  # width of each rank's bar


@plot
def ledgers(
    measured: Mapping[str, Iterable[Any]], theory: Mapping[str, Any] | None = None
) -> Drawn:
    """Draw ledgers as stacked bars side by side, and theory as marks.

    `measured` maps a name such as "ZeRO-1" to a `measure.Ledger` for each rank.
    `theory` maps some of the names to bytes by kind, or to their sum; for each rank, or
    once for all ranks. Raises ValueError for an empty ledger, unknown kinds and names,
    and numbers of ranks that differ. Chapter 07.
    """
    for name, ranks in measured.items():
        if isinstance(ranks, Mapping):
            raise ValueError(f"{name!r} has one ledger; it must have a list, by rank")
    bars = {name: list(ranks) for name, ranks in measured.items()}
    marks = {
        name: _per_rank(says, len(bars.get(name, ())))
        for name, says in (theory or {}).items()
    }
    _check_ledgers(bars, marks)
    kinds = kinds_among(ledger for group in bars.values() for ledger in group)
    kinds = [kind for kind in STACK if kind in kinds]
    every = [total_of(ledger) for group in bars.values() for ledger in group]
    unit, size = unit_of(max(every))
    figure, axes = canvas((max(6.0, 3.2 + 0.44 * (len(every) + len(bars))), 4))
    axes.set_ylim(0, 1.12 * max(every) / size)
    x, places = 0, {}
    for name, group in bars.items():
        places[name] = range(x, x + len(group))
        for at, ledger in zip(places[name], group, strict=True):
            _draw_ledger(axes, at, ledger, kinds, size)
        for at, says in zip(places[name], marks.get(name, ()), strict=False):
            _draw_marks(axes, at, says, size)
        x += len(group) + 1
    _name_ledgers(axes, places)
    axes.set_ylabel(f"resident on a rank [{unit}]")
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
    samples, names = samples_of(kinds[::-1])
    if marks:
        samples += axes.plot([], [], color=INK, linewidth=2.4)
        names.append("theory")
    figure.legend(samples, names, loc="outside right upper")
    words = [f"Memory of each rank by kind, in {unit}."]
    for name, group in bars.items():
        says = [total_of(s) if hasattr(s, "keys") else s for s in marks.get(name, ())]
        marked = ", ".join(f"{nbytes / size:.3g}" for nbytes in says)
        marked = f" (theory: {marked})" if marked else ""
        words.append(f"{name}: {_in_words(group, kinds, size)}{marked}.")
    return figure, " ".join(words)


def _in_words(group: Sequence[Any], kinds: Sequence[str], size: float) -> str:
    """Return the alternative text for a group's ledgers; one text if all are equal."""
    texts = []
    for ledger in group:
        parts = [f"{k} {ledger[k] / size:.3g}" for k in kinds if ledger.get(k, 0)]
        texts.append(f"{total_of(ledger) / size:.3g} ({', '.join(parts)})")
    return texts[0] if len(set(texts)) == 1 else "; ".join(texts)


def _per_rank(says: Any, ranks: int) -> list[Any]:
    """Return theory's bytes for each rank; a single ledger or number is repeated."""
    if hasattr(says, "keys") or isinstance(says, int | float):
        return [says] * max(1, ranks)
    return list(says)


def _check_ledgers(
    bars: Mapping[str, Sequence[Any]], marks: Mapping[str, Sequence[Any]]
) -> None:
    if not bars:
        raise ValueError("there are no ledgers; at least one must be drawn")
    for name, group in bars.items():
        if not group or not all(total_of(ledger) for ledger in group):
            raise ValueError(f"a ledger of {name!r} is empty; there is nothing to draw")
    for name, says in marks.items():
        if name not in bars:
            raise ValueError(
                f"theory has the name {name!r}; measured has {sorted(bars)}"
            )
        if len(says) != len(bars[name]):
            raise ValueError(
                f"{name!r} has measured ledgers of {len(bars[name])} ranks and theory "
                f"for {len(says)}; pass as many of both"
            )


def _draw_ledger(
    axes: Axes, x: float, ledger: Mapping[str, float], kinds: Sequence[str], size: float
) -> None:
    """Draw a rank's ledger as a stacked bar, with its sum above it."""
    low = 0.0
    for kind in kinds:
        has = ledger.get(kind, 0) / size
        if has:
            axes.bar([x], [has], BAR, low, linewidth=0.8, **KIND_LOOKS[kind].bar)
        low += has
    axes.annotate(f"{low:.3g}", (x, low), xytext=(0, 4), textcoords="offset points",
                  ha="center", fontsize=9, fontweight="bold")  # fmt: skip


def _draw_marks(axes: Axes, x: float, says: Any, size: float) -> None:
    """Draw a mark at theory's sum, or at the upper end of each kind."""
    ends = [says / size] if not hasattr(says, "keys") else []
    if not ends:
        kinds_among([says])  # raises for an unknown kind
        low = 0.0
        for kind in STACK:
            low += says.get(kind, 0) / size
            if says.get(kind, 0):
                ends.append(low)
    for end in ends:
        draw_mark(axes, x, end, BAR / 2 + 0.06)


def _name_ledgers(axes: Axes, places: Mapping[str, range]) -> None:
    """Write the names below the axis, and each rank's number in its colour."""
    ticks = [x for xs in places.values() for x in xs]
    ranks = [rank for xs in places.values() for rank in range(len(xs))]
    labels = axes.set_xticks(ticks, [f"{rank}" for rank in ranks])
    axes.tick_params(axis="x", length=0)
    for tick, rank in zip(labels, ranks, strict=True):
        color = rank_color(rank)
        box = {"fc": color, "ec": darker(color), "boxstyle": "round,pad=0.25"}
        tick.label1.set(bbox=box, color=text_color(color), fontsize=9)
    for name, xs in places.items():
        name_below(axes, name, xs)


# ---- memory against communication ----------------------------------------------------


@plot
def memory_against_communication(rows: Iterable[Sequence[Any]]) -> Drawn:
    """Draw strategies' stored bytes against their sent bytes, relative to DDP's.

    A row is (name, bytes resident on a rank, bytes that it sends in a step). Marks of
    names that begin with "PyTorch" are hollow. Raises ValueError if no row is "DDP", a
    name occurs twice, or a number is not above 0. Chapter 08.
    """
    rows = [(f"{name}", float(has), float(sent)) for name, has, sent in rows]
    unit = _check_stages(rows)
    points = {n: (sent / unit[1], has / unit[0]) for n, has, sent in rows}
    figure, axes = canvas((7.5, 4.2))
    look = {"color": MUTED, "linewidth": 1, "linestyle": (0, (4, 3))}
    axes.axhline(1, **look)
    axes.axvline(1, **look)
    for name, (x, y) in points.items():
        theirs = name.startswith("PyTorch")
        look = {"color": INK, "markersize": 9, "zorder": 4}
        fill = "white" if theirs else INK
        mark = "s" if theirs else "o"
        axes.plot([x], [y], mark, markerfacecolor=fill, **look)
    axes.set_xlim(0, 1.5 * max(x for x, _ in points.values()))
    axes.set_ylim(0, 1.15 * max(y for _, y in points.values()))
    _name_points(axes, points)
    axes.set_xlabel("bytes sent in a step, DDP = 1")
    axes.set_ylabel("bytes resident, DDP = 1")
    axes.grid(**GRID)
    axes.set_axisbelow(True)
    texts = [f"{name} sends {x:.3g}, keeps {y:.3g}" for name, (x, y) in points.items()]
    words = "Memory of a rank against what it sends in a step, DDP = 1. "
    return figure, words + "; ".join(texts) + "."


def _check_stages(rows: Sequence[tuple[str, float, float]]) -> tuple[float, float]:
    """Check all rows; return the resident and the sent bytes of DDP."""
    names = [name for name, *_ in rows]
    if "DDP" not in names:
        raise ValueError(f"the rows have the names {names}; one must be DDP")
    if len(set(names)) < len(names):
        raise ValueError(f"the rows have the names {names}; each may occur once")
    for name, *numbers in rows:
        for value in numbers:
            check_positive(f"bytes of {name!r}", value)
    return next((has, sent) for name, has, sent in rows if name == "DDP")


def _name_points(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Write each point's name beside it, without overlapping others."""
    figure = axes.get_figure()
    across, high = figure.get_size_inches() * 72 * 0.86  # size of the plot, in points
    right, top = axes.get_xlim()[1], axes.get_ylim()[1]
    at = {n: (x / right * across, y / top * high) for n, (x, y) in points.items()}
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in at.values()]
    for name, (x, y) in at.items():
        wide = 6.4 * len(name)
        places = [(way, up) for up in (0, 13, -13, 26, -26) for way in (9, -9)]
        for way, up in places:
            left = x + way - (wide if way < 0 else 0)
            box = (left, y + up - 6, left + wide, y + up + 6)
            inside = left > 0 and box[2] < across and 6 < box[1] < high - 12
            if inside and not any(_overlap(box, other) for other in taken):
                break
        taken.append(box)
        axes.annotate(name, points[name], xytext=(way, up), fontsize=10,
                      textcoords="offset points", va="center",
                      ha="left" if way > 0 else "right", zorder=3,
                      bbox={"fc": "white", "ec": "none", "pad": 0.5})  # fmt: skip


def _overlap(a: Sequence[float], b: Sequence[float]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
