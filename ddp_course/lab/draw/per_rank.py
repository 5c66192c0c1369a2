"""Figures of what each rank did: how many bytes it sent, and what it did when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddp_course.lab.draw.plots import style
from ddp_course.lab.palette import INK, WHOLE, darker, lighter, rank_color, text_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMMUNICATION = (
    "send", "recv", "isend", "irecv", "broadcast", "scatter", "gather", "reduce",
    "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "barrier",
)  # fmt: skip
BLANK = ("idle", "wait")  # ops that are not drawn
ROW = 0.78  # how much of a rank's row its bars fill


def plot_bytes(
    measured: Mapping[str, Sequence[float]], theory: Mapping[str, Sequence[float]]
) -> Figure:
    """Draw what each rank sent, in whole tensors S, and what theory says, as a mark.

    Both map an algorithm to a value for each rank. Raises ValueError if they are not of
    the same algorithms and as many ranks.
    """
    import matplotlib
    from matplotlib import pyplot

    _check_bytes(measured, theory)
    bars = sum(map(len, measured.values())) + len(measured)
    places, x = {}, 0
    for name, values in measured.items():
        places[name] = range(x, x + len(values))
        x += len(values) + 1
    with matplotlib.rc_context():
        style()
        size = (max(4.5, 1.2 + 0.36 * bars), 3.4)
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        for name, xs in places.items():
            colors = [rank_color(rank) for rank in range(len(xs))]
            edges = [darker(color) for color in colors]
            axes.bar(xs, [*map(float, measured[name])], 0.86, color=colors, ec=edges)
            marks = [(i - 0.5, i + 0.5) for i in xs]
            for (low, high), value in zip(marks, theory[name], strict=True):
                for color, width in (("white", 5), (INK, 2.4)):  # seen on black, too
                    ends = [float(value)] * 2
                    axes.plot([low, high], ends, color=color, linewidth=width)
            axes.annotate(
                name.replace(", ", ",\n"),
                ((xs[0] + xs[-1]) / 2, 0),
                xycoords=axes.get_xaxis_transform(),
                xytext=(0, -22),
                textcoords="offset points",
                ha="center",
                va="top",
            )
        axes.plot([], [], color=INK, linewidth=2.4, label="theory")
        axes.bar([0], [0], color=WHOLE, ec=darker(WHOLE), label="measured")
        _label_ranks(axes, places)
    pyplot.close(figure)
    return figure


def _label_ranks(axes: Axes, places: Mapping[str, range]) -> None:
    """Write each rank's number below its bar."""
    axes.set_xticks(
        [x for xs in places.values() for x in xs],
        [f"{rank}" for xs in places.values() for rank in range(len(xs))],
    )
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("sent by each rank [S]")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.02)
    axes.grid(axis="y", color="#E3E6EA", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2)


def _check_bytes(
    measured: Mapping[str, Sequence[float]], theory: Mapping[str, Sequence[float]]
) -> None:
    if not measured or set(measured) != set(theory):
        raise ValueError(
            f"measured are {sorted(measured)}, theory is of {sorted(theory)}; it must "
            "be the same algorithms, at least one"
        )
    for name, values in measured.items():
        if not len(values) or len(values) != len(theory[name]):
            raise ValueError(
                f"{name!r} has {len(values)} measured values, {len(theory[name])} of "
                "theory; it must be one of each for every rank"
            )


def plot_timeline(events: Iterable[Any]) -> Figure:
    """Draw what each rank did when: a row for each rank, rank 0 on top, time in ms.

    Events have the attributes rank, op, start and end (in seconds), and nbytes, such as
    `ddp_course.measure.events.Event`. Those of the lane "communication", that sent
    bytes or are named like a collective are hatched; computing is solid, a backward
    pass lighter; waiting is left blank. Where a rank does both at once, communication
    is drawn below. Raises ValueError if there are no events.
    """
    import matplotlib
    from matplotlib import pyplot

    events = sorted(events, key=lambda e: (e.rank, e.start))
    if not events:
        raise ValueError("there are no events; at least one must be drawn")
    first = min(e.start for e in events)
    last = max(e.end for e in events)
    ranks = sorted({e.rank for e in events})
    split = _overlap(events)
    with matplotlib.rc_context():
        style()
        matplotlib.rcParams["hatch.linewidth"] = 1.0
        size = (8.5, 1.1 + 0.42 * len(ranks) * (1.4 if split else 1))
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        for event in events:
            if event.op not in BLANK:
                _bar(axes, event, ranks.index(event.rank), first, last - first, split)
        axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        axes.set_ylim(len(ranks) - 0.5, -0.5)  # rank 0 on top
        axes.set_xlim(0, (last - first) * 1e3 or 1)
        axes.set_xlabel("time [ms]")
        axes.tick_params(axis="y", length=0)
        kinds = {communicates(e) for e in events if e.op not in BLANK}
        for kind, name in ((False, "compute"), (True, "communication")):
            if kind in kinds:
                look = _look(WHOLE, kind, False)
                axes.barh([0], [0], label=name, **look)
        axes.legend(
            loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.2
        )
    pyplot.close(figure)
    return figure


def communicates(event: Any) -> bool:
    """Tell whether an event is communication; everything else is computing."""
    if getattr(event, "lane", "") == "communication" or event.nbytes > 0:
        return True
    return event.op.partition(",")[0].split(".")[-1] in COMMUNICATION


def _overlap(events: Sequence[Any]) -> bool:
    """Return whether some rank computes and communicates at the same time."""
    drawn = [e for e in events if e.op not in BLANK]
    sends, computes = (
        [e for e in drawn if communicates(e) is kind] for kind in (True, False)
    )
    return any(
        a.rank == b.rank and max(a.start, b.start) < min(a.end, b.end)
        for a in sends
        for b in computes
    )


def _look(color: str, sends: bool, pale: bool) -> dict[str, Any]:
    if sends:
        edge = darker(color, 0.3)
        return {"color": "white", "ec": edge, "hatch": "////", "linewidth": 1}
    fill = lighter(color) if pale else color
    return {"color": fill, "ec": darker(fill), "linewidth": 1}


def _bar(
    axes: Axes, event: Any, row: int, first: float, span: float, split: bool
) -> None:
    """Draw an event, and its name if there is room for it."""
    sends = communicates(event)
    high = ROW / 2 if split else ROW
    y = row + (high / 2 if sends else -high / 2) * split
    pale = "backward" in event.op
    look = _look(rank_color(event.rank), sends, pale)
    left, wide = (event.start - first) * 1e3, (event.end - event.start) * 1e3
    axes.barh([y], [wide], left=left, height=high, **look)
    points = 470 * (event.end - event.start) / span if span else 0
    if points > 6.5 * len(event.op) + 8:
        box = {"fc": "white", "ec": "none", "pad": 1.2} if sends else None
        color = INK if sends else text_color(look["color"])
        axes.text(
            left + wide / 2, y, event.op, color=color, bbox=box,
            ha="center", va="center_baseline", fontsize=9,
        )  # fmt: skip
