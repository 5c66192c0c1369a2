"""One colour for each rank, the same in every figure of the course.

The eight colours are those of Okabe and Ito (2008, "Color Universal Design"): people
with any of the usual colour deficiencies can tell them apart. Meaning never rests on
colour alone: a figure prints the rank's number into each block.
"""

from __future__ import annotations

RANK_COLORS = (
    "#0072B2",  # blue
    "#E69F00",  # orange
    "#009E73",  # green
    "#CC79A7",  # pink
    "#56B4E9",  # sky
    "#D55E00",  # vermilion
    "#000000",  # black
    "#F0E442",  # yellow
)
INK = "#222222"  # text and outlines
MUTED = "#5F6670"  # secondary text
PANEL = "#F3F4F6"  # a container: a node, a GPU
PANEL_EDGE = "#A9B0BA"
WHOLE = "#D5D9DF"  # something of which every rank has a full copy


def rank_color(rank: int) -> str:
    """Return the colour of `rank`; after eight ranks the colours start again."""
    return RANK_COLORS[rank % len(RANK_COLORS)]


def contrast(a: str, b: str) -> float:
    """Return the contrast of two colours, 1 (none) to 21 (black on white).

    As defined by WCAG 2.1, which asks for 4.5 between a text and its background.
    """
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def text_color(fill: str) -> str:
    """Return black or white, whichever is easier to read on `fill`."""
    return max(("#000000", "#FFFFFF"), key=lambda color: contrast(color, fill))


def darker(color: str, amount: float = 0.45) -> str:
    """Return `color` mixed with black: the edge of a block."""
    return _mix(color, "#000000", amount)


def lighter(color: str, amount: float = 0.55) -> str:
    """Return `color` mixed with white: a backward pass beside its forward pass."""
    return _mix(color, "#FFFFFF", amount)


def _channels(color: str) -> list[int]:
    return [int(color[i : i + 2], 16) for i in (1, 3, 5)]


def _mix(a: str, b: str, amount: float) -> str:
    pairs = zip(_channels(a), _channels(b), strict=True)
    return "#" + "".join(f"{round(x + (y - x) * amount):02X}" for x, y in pairs)


def _luminance(color: str) -> float:
    levels = [c / 255 for c in _channels(color)]
    r, g, b = (
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in levels
    )
    return 0.2126 * r + 0.7152 * g + 0.0722 * b
