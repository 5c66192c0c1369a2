"""The picture of the README: one model, cut in five ways, the same training."""

from __future__ import annotations

from ddp_course.lab.draw.drawing import Drawing, Point
from ddp_course.lab.palette import MUTED, PANEL, PANEL_EDGE, WHOLE, rank_color

MARGIN, GAP, CARD_W, CARD_H = 16, 10, 150, 194
WIDTH = 5 * CARD_W + 4 * GAP + 2 * MARGIN
MIDDLE = WIDTH / 2
CARDS = 152  # y of the cards' top
END = CARDS + CARD_H + 36  # y where the five ways meet again
HEIGHT = END + 72
SIDE = 84  # what is cut is a square: four bars of 21, or of 18 with gaps of 4
# The boxes of a square, by the rank that has them, and how round their corners are.
ROWS = [(i, (0, 21 * i, SIDE, 21), 0) for i in range(4)]
COLUMNS = [(i, (21 * i, 0, 21, SIDE), 0) for i in range(4)]
QUADRANTS = [(i, (42 * (i % 2), 42 * (i // 2), 42, 42), 0) for i in range(4)]
LAYERS = [(i, (0, 22 * i, SIDE, 18), 4) for i in range(4)]
CELLS = [(i, (21 * i, 22 * j, 21, 18), 0) for j in range(4) for i in range(4)]


def course_map() -> Drawing:
    """Draw one model and the five ways in which the course cuts it."""
    d = Drawing(
        WIDTH,
        HEIGHT,
        title="One model, cut in five ways, and always the same loss curve",
        description="Four ranks train one model. Cut by batch: DP and DDP. By "
        "optimizer state: ZeRO-1 and ZeRO-2. By weight: FSDP. By column: tensor "
        "parallel. By layer: pipeline. Every way leads to the same loss curve.",
    )
    cards = (
        ("by batch", "DP, DDP", "of the batch", ROWS),
        ("by optimizer state", "ZeRO-1, ZeRO-2", "of the optimizer state", QUADRANTS),
        ("by weight", "FSDP", "of every layer's weights", CELLS),
        ("by column", "tensor parallel", "of every layer's columns", COLUMNS),
        ("by layer", "pipeline", "of the layers", LAYERS),
    )
    for i in range(len(cards)):
        x = MARGIN + i * (CARD_W + GAP) + CARD_W / 2
        _way(d, (MIDDLE, 118), (x, CARDS))
        _way(d, (MIDDLE, END), (x, CARDS + CARD_H))
    for i, (cut, name, share, glyph) in enumerate(cards):
        with d.shifted(MARGIN + i * (CARD_W + GAP), CARDS):
            d.rect(0, 0, CARD_W, CARD_H, fill=PANEL, stroke=PANEL_EDGE, radius=8)
            d.text(CARD_W / 2, 22, cut, size=12)
            with d.shifted((CARD_W - SIDE) / 2, 36):
                _glyph(d, glyph, [rank_color(rank) for rank in range(4)], "0123")
            d.text(CARD_W / 2, 143, name, size=14, bold=True)
            d.text(CARD_W / 2, 163, "each rank: a quarter", size=11, fill=MUTED)
            d.text(CARD_W / 2, 179, share, size=11, fill=MUTED)
    _model(d)
    _curve(d)
    return d


def _model(d: Drawing) -> None:
    """Draw the whole thing, in grey: the batch, the layers, the optimizer's state."""
    grey, blank = [WHOLE] * 4, " " * 4
    parts = (("batch", ROWS), ("one model", LAYERS), ("optimizer state", QUADRANTS))
    for i, (name, glyph) in enumerate(parts):
        x = MIDDLE + (i - 1) * 140
        with d.shifted(x - SIDE / 2, 8):
            _glyph(d, glyph, grey, blank)
        d.text(x, 108, name, size=12)
    d.arrow((MIDDLE - 140 + SIDE / 2 + 5, 50), (MIDDLE - SIDE / 2 - 5, 50))
    d.arrow((MIDDLE + 140 - SIDE / 2 - 5, 50), (MIDDLE + SIDE / 2 + 5, 50))


def _way(d: Drawing, start: Point, end: Point) -> None:
    control = end[0], start[1]
    d.curve(start, control, end, stroke=PANEL_EDGE, stroke_width=2)


def _glyph(d: Drawing, parts: list, fills: list[str], names: str) -> None:
    """Draw a square, cut into parts."""
    for rank, box, radius in parts:
        d.block(*box, names[rank], fill=fills[rank], radius=radius)


def _curve(d: Drawing) -> None:
    """Draw what all five come to: one loss curve on top of another."""
    left, bottom = MIDDLE - 190, END + 58
    d.line((left, bottom - 50), (left, bottom), (left + 112, bottom))
    points = [(left + 6 + 5 * i, bottom - 6 - 38 / (1 + i / 4)) for i in range(21)]
    d.line(*points, stroke="#B9C0C9", stroke_width=7)
    d.line(*points, stroke_width=1.5, dashed=True)
    words = "every time the same loss curve"
    d.text(left + 132, bottom - 18, words, anchor="start", bold=True, size=14)


IMAGES = {"course_map.svg": course_map}
