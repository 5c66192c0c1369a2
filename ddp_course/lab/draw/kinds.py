"""The looks of kinds of memory: greys and patterns, since colours stand for ranks.

Parameters, gradients and optimizer states are solid, from dark to light. Activations
are dotted. Communication buffers are hatched, as communication is in all figures of the
course. Where there is room, the name is written into the block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddp_course.lab.draw.drawing import Box, Drawing
from ddp_course.lab.palette import INK, MUTED, darker, text_color
from ddp_course.theory.checks import check_choice, check_not_negative

DOTS = 6  # pixels between two dots, as between two lines of `Drawing.hatch`


@dataclass(frozen=True)
class KindLook:
    """The look of a kind of memory: its fill, and a pattern "dots", "lines" or ""."""

    fill: str
    pattern: str = ""

    @property
    def edge(self) -> str:
        """The colour of the block's edge."""
        return MUTED if self.pattern or self.fill == "#FFFFFF" else darker(self.fill)

    @property
    def bar(self) -> dict[str, Any]:
        """The look as arguments of matplotlib's bars and areas."""
        hatch = {"dots": "..", "lines": "////", "": None}[self.pattern]
        return {"facecolor": self.fill, "edgecolor": self.edge, "hatch": hatch}


KIND_LOOKS = {
    "parameters": KindLook("#4A525C"),
    "gradients": KindLook("#8F97A2"),
    "optimizer states": KindLook("#CFD4DA"),
    "activations": KindLook("#FFFFFF", "dots"),
    "communication buffers": KindLook("#FFFFFF", "lines"),
    "other": KindLook("#FFFFFF"),
}


def draw_kind(d: Drawing, box: Box, kind: str) -> None:
    """Draw a rectangle of memory of a kind, without a name."""
    look = KIND_LOOKS[kind]
    d.rect(*box, fill=look.fill, stroke=look.edge)
    if look.pattern == "lines":
        d.hatch(*box, stroke=look.edge)
    elif look.pattern == "dots":
        dots(d, box, look.edge)


def dots(d: Drawing, box: Box, color: str) -> None:
    """Fill a rectangle with dots, each a short dash of a line."""
    x, y, width, height = box
    rows = max(1, int((height - 2) // DOTS))
    top = y + (height - (rows - 1) * DOTS) / 2
    for row in range(rows):
        left = x + 2 + DOTS / 2 * (row % 2)
        if x + width - 2 > left:
            line = (left, top + row * DOTS), (x + width - 2, top + row * DOTS)
            d.line(*line, stroke=color, stroke_width=1.4, dashed=f"1.4 {DOTS - 1.4:g}")


def kind_block(d: Drawing, box: Box, kind: str, name: str, size: float = 11) -> None:
    """Draw memory of a kind, with its `name` if that fits."""
    draw_kind(d, box, kind)
    x, y, width, height = box
    look, wide, high = KIND_LOOKS[kind], room(name, size), 0.75 * size
    if not name or wide + 6 > width or high + 4 > height:
        return
    middle, base = x + width / 2, y + height / 2 + 0.36 * size
    if look.pattern:
        ground = middle - wide / 2 - 2, base - high - 2, wide + 4, high + 4
        d.rect(*ground, fill=look.fill, stroke="none")
    ink = INK if look.pattern else text_color(look.fill)
    d.text(middle, base, name, size=size, fill=ink)


def room(text: str, size: float = 11, bold: bool = False) -> float:
    """Return the pixels that a text takes at most, in any usual sans-serif font."""
    narrow = sum(character in " .,:;'il|()" for character in text)
    return size * (0.67 * (len(text) - narrow) + 0.4 * narrow) * (1.1 if bold else 1)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 step", "2 steps"."""
    return f"{count} {noun}" + ("" if count == 1 else "s")


def wrapped(text: str, width: float, size: float = 12) -> list[str]:
    """Return `text` in lines that take at most `width` pixels each."""
    lines: list[str] = []
    for word in text.split(" "):
        if lines and room(f"{lines[-1]} {word}", size) <= width:
            lines[-1] += f" {word}"
        elif word:
            lines.append(word)
    return lines


def draw_kinds_legend(d: Drawing, x: float, y: float, kinds: Iterable[str]) -> None:
    """Draw small samples of `kinds` with their names in a line; `y` is its middle."""
    for kind in kinds:
        draw_kind(d, (x, y - 7, 22, 14), kind)
        d.text(x + 28, y + 4, kind, size=11, anchor="start")
        x += 44 + room(kind)


def kinds_among(ledgers: Iterable[Any]) -> list[str]:
    """Return the kinds of which some ledger has bytes, in the order of the course.

    Raises ValueError for a kind that the course does not know, and for bytes below 0.
    """
    seen: set[str] = set()
    for ledger in ledgers:
        for kind in ledger:
            check_choice("a kind of memory", kind, KIND_LOOKS)
            check_not_negative(f"bytes of {kind}", ledger[kind])
            if ledger[kind]:
                seen.add(kind)
    return [kind for kind in KIND_LOOKS if kind in seen]
