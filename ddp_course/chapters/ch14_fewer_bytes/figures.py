"""The figures of chapter 14: the parts of a gradient that are sent, bytes, losses."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.plots import GRID, Drawn, canvas, plot
from ddp_course.lab.palette import INK, MUTED, PANEL_EDGE, WHOLE, rank_color
from ddp_course.model import build_gpt
from ddp_course.theory import compressed_bytes

ROWS, COLUMNS, CELL = 6, 8, 14  # a gradient, and pixels of one of its numbers
LARGE = ((0, 5), (2, 1), (3, 6), (5, 3))  # invented places of the largest numbers
WAYS = {
    "in full": "32 bits each",
    "16 bits": "half of each",
    "8 bits": "and a scale",
    "a sign": "1 bit, and a scale",
    "top-k": "numbers, and where",
    "low rank": "two thin matrices",
    "every 4th step": "weights, in full",
}


def what_travels() -> Drawing:
    """Draw how much of a 6 x 8 gradient each of seven ways sends. Chapter 14."""
    wide, high = COLUMNS * CELL, ROWS * CELL
    across, down = wide + 52, high + 66
    d = Drawing(
        4 * across + 8,
        2 * down + 30,
        title="What travels of a gradient",
        description="; ".join(f"{name}: {what}" for name, what in WAYS.items()) + ".",
    )
    for k, (name, what) in enumerate(WAYS.items()):
        with d.shifted(12 + k % 4 * across, 10 + k // 4 * down):
            _draw_way(d, name)
            d.text(wide / 2 + 6, high + 28, name, bold=True)
            d.text(wide / 2 + 6, high + 46, what, size=12, fill=MUTED)
    d.rect(12, 2 * down + 6, CELL, CELL, fill=INK)
    d.text(12 + CELL + 8, 2 * down + 18, "travels", size=12, anchor="start")
    d.rect(110, 2 * down + 6, CELL, CELL, fill="#FFFFFF", stroke=PANEL_EDGE)
    d.text(110 + CELL + 8, 2 * down + 18, "stays", size=12, anchor="start")
    return d


def _draw_way(d: Drawing, name: str) -> None:
    share = {"in full": 1.0, "16 bits": 1 / 2, "8 bits": 1 / 4, "a sign": 1 / 14}
    if name == "every 4th step":
        for step in range(4):
            x, y = step % 2 * 66, step // 2 * 46
            fill = INK if step == 3 else "#FFFFFF"
            d.rect(x + 2, y, 58, 40, fill=fill, stroke=PANEL_EDGE)
        return
    for row in range(ROWS):
        for column in range(COLUMNS):
            x, y = 12 + column * CELL, 12 + row * CELL
            d.rect(x, y, CELL, CELL, fill="#FFFFFF", stroke=PANEL_EDGE)
            tall = CELL * share.get(name, name == "top-k" and (row, column) in LARGE)
            if tall:
                d.rect(x, y + CELL - tall, CELL, tall, fill=INK, stroke="none")
    if name == "low rank":
        d.rect(0, 12, 8, ROWS * CELL, fill=INK)
        d.rect(12, 0, COLUMNS * CELL, 8, fill=INK)


def bytes_sent(
    ranks: int = 4, density: float = 0.01, rank: int = 4, every: int = 8
) -> Drawing:
    """Draw bars of the bytes that a rank sends for the course's GPT, by `theory`.

    `density` belongs to top-k and random-k, `rank` to PowerSGD; `every` is local SGD's
    H. The longest bar fills the drawing; bars longer than DDP's, 1, are dark.
    """
    names = ["fp16", "int8", "sign"]
    names += [f"topk:{density:g}", f"randomk:{density:g}", f"powersgd:{rank}"]
    in_full = compressed_bytes("none", _shapes(), ranks)
    sent = {n: compressed_bytes(n, _shapes(), ranks) / in_full for n in names}
    sent[f"local, H = {every}"] = 1 / every
    left, wide, row = 130, 360, 26
    unit = wide / max(1.2, *sent.values())
    d = Drawing(
        left + wide + 90,
        len(sent) * row + 40,
        title=f"With {ranks} ranks",
        description="Of the bytes that a rank sends in a step of DDP: "
        + "; ".join(f"{name}: {share:.3g}" for name, share in sent.items()),
    )
    d.line((left + unit, 6), (left + unit, len(sent) * row + 10), dashed=True)
    d.text(left + unit, len(sent) * row + 28, "what DDP sends", size=12)
    for k, (name, share) in enumerate(sent.items()):
        y, long = 10 + k * row, unit * share
        d.text(left - 8, y + 14, name, anchor="end")
        d.rect(left, y, max(long, 1), row - 8, fill=WHOLE if share <= 1 else MUTED)
        says = f"{share:.2g}" if share < 100 else f"{share:.0f}"
        d.text(left + long + 8, y + 14, says, anchor="start", size=12)
    return d


@functools.cache
def _shapes() -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in build_gpt("1m").parameters()]


@plot
def drift(
    distances: Sequence[Sequence[float]], every: int, ylabel: str = "from the mean"
) -> Drawn:
    """Draw how far each replica is from the mean of all replicas, step by step.

    `distances[step][rank]` is measured after each step, before any average. The
    replicas are averaged after every `every` steps, which a vertical line shows.
    """
    figure, axes = canvas((7, 3.2))
    steps = range(1, len(distances) + 1)
    for rank, values in enumerate(zip(*distances, strict=True)):
        look = {"color": rank_color(rank), "linewidth": 4.0 - rank, "marker": "."}
        axes.plot(steps, values, label=f"rank {rank}", **look)
    for step in range(every, len(distances) + 1, every):
        axes.axvline(step + 0.5, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set(xlabel="step", ylabel=ylabel, ylim=(0, None))
    axes.grid(axis="y", **GRID)
    axes.legend(loc="upper right")
    first, last = (f"{max(distances[step]):.3g}" for step in (0, every - 1))
    text = f"after step 1: {first}, before the first average: {last}"
    return figure, f"How far replicas are from their mean. The furthest, {text}."


@plot
def worth(curves: Mapping[str, Sequence[tuple[float, float]]], base: str) -> Drawn:
    """Draw losses over bytes.

    `curves` maps a name to pairs (bytes that a rank has sent so far, loss). The curve
    `base` is drawn as a thick line; raises KeyError if no curve has this name.
    """
    figure, axes = canvas((7.2, 5.2))
    ends = {name: curve[-1] for name, curve in curves.items()}
    for (name, curve), look in zip(curves.items(), _looks(curves, base), strict=True):
        axes.plot(*zip(*curve, strict=True), marker="o", markevery=[-1], **look)
        low = ends[name][1] < ends[base][1] + 0.15  # room on the lower left
        place = {"xytext": (-4, -5) if low else (4, 4), "textcoords": "offset points"}
        place |= {"ha": "right", "va": "top"} if low else {"ha": "left", "va": "bottom"}
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8}
        axes.annotate(name, ends[name], bbox=box, **place)
    axes.set(xlabel="sent by a rank so far [MB]", ylabel="loss", xscale="log")
    axes.xaxis.set_major_formatter(lambda sent, _: f"{sent / 1e6:g}")
    axes.grid(**GRID)
    texts = [f"{name}: {sent:,.0f} bytes, {loss:.2f}"
            for name, (sent, loss) in ends.items()]  # fmt: skip
    return figure, f"The loss over what was sent. At the end {'; '.join(texts)}."


@plot
def over_time(
    links: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], base: str
) -> Drawn:
    """Draw losses over time, in a panel for each link.

    `links` maps a link to {name: pairs (seconds, loss)}. Each name is written at the
    end of its curve, and the curve `base` is drawn as a thick line.
    """
    size = (7.2, 2.6 * len(links))
    figure, panels = canvas(size, nrows=len(links), squeeze=False)
    texts, line = [], {"arrowstyle": "-", "color": PANEL_EDGE, "relpos": (0, 0.5)}
    for axes, (link, curves) in zip(panels.flat, links.items(), strict=True):
        for look, curve in zip(_looks(curves, base), curves.values(), strict=True):
            axes.plot(*zip(*curve, strict=True), **look)
        ends = {name: curve[-1][1] for name, curve in curves.items()}
        right, lowest = max(x for (*_, (x, _)) in curves.values()), min(ends.values())
        for name, y in _apart(ends, 0.095).items():
            at = 1.05 * right, y
            axes.annotate(name, curves[name][-1], at, va="center", arrowprops=line)
        axes.set(title=link, ylabel="loss", xlim=(0, 1.2 * right))
        axes.set_ylim(lowest - 0.25, lowest + 0.85)
        axes.grid(**GRID)
        texts.append(f"{link}: {', '.join(f'{n} {y:.2f}' for n, y in ends.items())}")
    axes.set_xlabel("time [s]")
    return figure, f"The loss over time. At the end, at {'; at '.join(texts)}."


def _apart(at: Mapping[str, float], gap: float) -> dict[str, float]:
    """Return {name: height}, moved apart until no two names are nearer than `gap`."""
    names = sorted(at, key=at.get)
    up = accumulate(map(at.get, names), lambda below, y: max(y, below + gap))
    down = accumulate(map(at.get, names[::-1]), lambda above, y: min(y, above - gap))
    return {n: (a + b) / 2 for n, a, b in zip(names, up, [*down][::-1], strict=True)}


def _looks(names: Iterable[str], base: str) -> Iterator[dict[str, Any]]:
    """Yield a line style for each name; `base` is drawn as a thick line.

    Methods that send fewer numbers are dashed, methods with fewer messages dotted.
    """
    dashes = {"topk": (5, 2), "powersgd": (5, 2), "local": (1, 1.5), "diloco": (1, 1.5)}
    for k, name in enumerate(names):
        own = next((d for start, d in dashes.items() if name.startswith(start)), None)
        thin = {"color": (INK, MUTED)[k % 2], "linewidth": 1.5, "linestyle": (0, own)}
        yield {"color": PANEL_EDGE, "linewidth": 5} if name == base else thin


IMAGES = {"14_fewer_bytes.svg": what_travels}
