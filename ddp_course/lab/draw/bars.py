"""Recorded events as bars: computing, launching, sending, waiting. Chapter 05."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ddp_course.lab.draw.drawing import Drawing
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
    d: Drawing, bar: Bar, y: float, tall: float, numbers: dict[int, int]
) -> None:
    """Draw a bar of height `tall` at `y`, and what it is if there is room.

    `numbers` tells which bucket an event is about: id(event) -> bucket.
    """
    left, right, event, _ = bar
    wide, color = right - left, rank_color(event.rank)
    number = numbers.get(id(event))
    fill = lighter(color) if "backward" in event.op else color
    if communicates(event):
        d.rect(left, y, wide, tall, fill="#FFFFFF", stroke=darker(color, 0.3))
        if wide >= 3:
            d.hatch(left, y, wide, tall, stroke=darker(color, 0.3))
        ink = INK
    elif event.lane == "wait" or event.op == "idle":
        d.rect(left, y, wide, tall, stroke=PANEL_EDGE, dashed=True)
        ink = MUTED
    elif event.lane == "launch":
        d.rect(left, y, wide, tall, fill=darker(color), stroke="none")
        ink = text_color(darker(color))
    else:
        d.rect(left, y, wide, tall, fill=fill, stroke=darker(fill))
        ink = text_color(fill)
    label = _label(event, number, wide)
    if label and communicates(event):
        room = _room(label)
        d.rect(left + (wide - room) / 2, y + 1, room, tall - 2, fill="#FFFFFF",
               stroke="none")  # fmt: skip
    if label:
        d.text(left + wide / 2, y + tall / 2 + 4, label, size=11, fill=ink)


def _label(event: Any, number: int | None, wide: float) -> str:
    """Return the longest name of an event that fits."""
    says = [event.op]
    if number is not None:
        says = [f"{event.op}, bucket {number}", f"bucket {number}", f"{number}"]
        says = says[1:] if communicates(event) else says  # hatching tells the rest
    spare = HATCHED if communicates(event) else 2
    return next((text for text in says if wide > _room(text) + spare), "")


def _room(label: str) -> float:
    """Return the pixels that a label takes, with a little air at both ends."""
    return 7.0 * len(label) + (3 if label.isdigit() else 6)
