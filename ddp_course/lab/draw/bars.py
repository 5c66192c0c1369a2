"""Blocks on an axis of time: computing, launching, sending, waiting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.kinds import room
from ddp_course.lab.draw.per_rank import communicates
from ddp_course.lab.palette import (
    INK,
    MUTED,
    PANEL_EDGE,
    darker,
    lighter,
    rank_color,
    text_color,
)

PLOT_W = 700  # pixels of the window of time
HATCHED = 8  # pixels of a message that its label must leave hatched
Bar = tuple[float, float, Any, int]  # from, to (pixels), event, how many events


def visible(line: Sequence[Any], start: float, scale: float) -> list[Bar]:
    """Return the bars of a line in the window that begins at `start`, in s.

    `scale` is in pixels per second. Every bar is at least a pixel wide; several short
    events of one kind in the same pixel are one bar.
    """
    bars: list[Bar] = []
    for event in line:
        left, right = ((t - start) * scale for t in (event.start, event.end))
        if right < 0 or left > PLOT_W:
            continue
        left, right = max(left, 0.0), min(right, PLOT_W)
        if right - left < 1:
            left = min(math.floor(left), PLOT_W - 1)
            right = left + 1
            if bars and bars[-1][0] == left and bars[-1][2].op == event.op:
                bars[-1] = (left, right, bars[-1][2], bars[-1][3] + 1)
                continue
        bars.append((left, right, event, 1))
    return bars


def draw_bar(
    d: Drawing, x: float, y: float, wide: float, tall: float, event: Any, labels: Any
) -> None:
    """Draw an event, and the first of `labels` for which there is room."""
    color, ink, sent = rank_color(event.rank), INK, communicates(event)
    if sent:
        d.rect(x, y, wide, tall, fill="#FFFFFF", stroke=darker(color, 0.3))
        if wide >= 3:
            d.hatch(x, y, wide, tall, stroke=darker(color, 0.3))
    elif event.lane == "wait" or event.op in ("wait", "idle"):
        d.rect(x, y, wide, tall, stroke=PANEL_EDGE, dashed=True)
        ink = MUTED
    else:
        fill = lighter(color) if "backward" in event.op else color
        fill = darker(color) if event.lane == "launch" else fill
        d.rect(x, y, wide, tall, fill=fill, stroke=darker(fill))
        ink = text_color(fill)
    for label in labels:
        half = room(label) / 2 + 1
        if 2 * half + (HATCHED if sent else 0) < wide:
            if sent:
                d.rect(x + wide / 2 - half, y + 1, 2 * half, tall - 2, fill="#FFFFFF",
                       stroke="none")  # fmt: skip
            d.text(x + wide / 2, y + tall / 2 + 4, label, size=11, fill=ink)
            return


def time_window(
    runs: Iterable[Sequence[Any]], start: float, width: float | None
) -> float:
    """Return the width of a window of time in ms: as given, or to the last event.

    Raises ValueError for a start below 0 and a width that is not above 0.
    """
    if not 0 <= start < math.inf:
        raise ValueError(f"start is {start!r}; it must be a time in ms, 0 or more")
    if width is None:
        longest = max(max(e.end for e in r) - min(e.start for e in r) for r in runs)
        width = max(longest * 1e3 - start, 1e-3)
    if not 0 < width < math.inf:
        raise ValueError(f"width is {width!r}; it must be a time in ms, above 0")
    return width


def draw_axis(
    d: Drawing,
    x: float,
    y: float,
    wide: float,
    long: float,
    label: str,
    *,
    start: float = 0.0,
    grid: float | None = None,
) -> None:
    """Draw an axis of time from `start` to `start + long` on `wide` pixels.

    It has about ten round numbers, and thin lines up to `grid` if that is given.
    """
    power = 10 ** math.floor(math.log10(long / 10))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= long / 10)
    d.line((x, y), (x + wide, y))
    last = math.floor((start + long) / step + 1e-9)
    for k in range(math.ceil(start / step - 1e-9), last + 1):
        at = x + (k * step - start) * wide / long
        if grid is None:
            d.line((at, y), (at, y + 5))
        else:
            d.line((at, grid), (at, y), stroke="#E3E6EA")
        d.text(at, y + 18, f"{k * step:.6g}", size=11)
    d.text(x + wide / 2, y + 36, label, size=12)
