"""The figures of chapter 00: one process beside four, and the course's map."""

from __future__ import annotations

from ddp_course.lab.draw.drawing import Drawing, Point
from ddp_course.lab.palette import MUTED, PANEL, PANEL_EDGE, WHOLE, lighter, rank_color

HEIGHT = 474
CARD_W, CARD_H = 116, 312  # size of a process's card
LEFT, RIGHT, STEP = 16, 192, 129  # left edges: the one process, rank 0, then each rank
BATCH, ROW_W, ROW_H, SAMPLES = 66, 60, 15, 8
FORWARD, BAR_H = 206, 22  # y of the first bar; height of a bar
AVERAGE, UPDATE = 268, 312
CHART, CHART_H = 372, 78
RANKS, EACH = 4, 2  # number of ranks; samples of each


def one_or_four() -> Drawing:
    """Draw one process with a batch of 8 beside four that share the batch."""
    right_w = (RANKS - 1) * STEP + CARD_W
    d = Drawing(
        RIGHT + right_w + LEFT,
        HEIGHT,
        title="One process or four: the same loss curve",
        description="Left: one process trains on a batch of eight samples. Right: four "
        "processes with the same model, each with its own 2 of the eight samples, "
        "average their gradients, and all make the same step. Below: both give the "
        "same loss curve.",
    )
    d.text(LEFT + CARD_W / 2, 24, "one process", size=15, bold=True)
    _process(d, LEFT, "whole batch", range(SAMPLES), WHOLE, alone=True)
    middle = RIGHT + right_w / 2
    d.text(middle, 24, "four processes", size=15, bold=True)
    for rank in range(RANKS):
        rows = range(EACH * rank, EACH * (rank + 1))
        _process(d, RIGHT + rank * STEP, f"rank {rank}", rows, rank_color(rank))
    d.rect(RIGHT + 8, AVERAGE, right_w - 16, BAR_H + 2, fill="#FFFFFF")
    d.hatch(RIGHT + 8, AVERAGE, right_w - 16, BAR_H + 2)
    label = "average the four gradients"
    half, high = 4 * len(label) + 2, BAR_H - 4
    d.rect(middle - half, AVERAGE + 3, 2 * half, high, fill="#FFFFFF", stroke="none")
    d.text(middle, AVERAGE + 17, label, bold=True)
    _curves(d, LEFT, CHART, d.width - 2 * LEFT, CHART_H, "four processes")
    return d


def _process(
    d: Drawing, x: float, name: str, rows: range, color: str, alone: bool = False
) -> None:
    """Draw a process: its rows of the batch, forward, backward, step."""
    middle, left = x + CARD_W / 2, x + (CARD_W - ROW_W) / 2
    d.rect(x, 36, CARD_W, CARD_H, fill=PANEL, stroke=PANEL_EDGE, radius=8)
    d.text(middle, 55, name, bold=True)
    d.rect(left, BATCH, ROW_W, SAMPLES * ROW_H, stroke=PANEL_EDGE, dashed=True)
    for row in rows:
        y = BATCH + row * ROW_H
        d.block(left, y, ROW_W, ROW_H, f"{row}", fill=color, size=11, radius=0)
    d.arrow((middle, BATCH + SAMPLES * ROW_H + 2), (middle, FORWARD - 2))
    width = CARD_W - 16
    d.block(x + 8, FORWARD, width, BAR_H, "forward", fill=color, size=12)
    pale = lighter(color)
    d.block(x + 8, FORWARD + BAR_H + 3, width, BAR_H, "backward", fill=pale, size=12)
    end = FORWARD + 2 * BAR_H + 3
    if not alone:
        d.arrow((middle, end + 1), (middle, AVERAGE - 1), stroke_width=1.2)
    start = end + 2 if alone else AVERAGE + BAR_H + 4
    d.arrow((middle, start), (middle, UPDATE - 2))
    d.block(x + 8, UPDATE, width, BAR_H, "step", fill="#FFFFFF", size=12)


def _curves(
    d: Drawing, x: float, y: float, width: float, height: float, many: str
) -> None:
    """Draw the two loss curves, the thin one on the wide one."""
    left, bottom = x + 44, y + height
    wiggle = (0, 3, -2, 2, -3, 1, 2, -2, 0, 2, -1, -2, 1)
    points = [
        (
            left + 6 + i * (width - 60) / 60,
            bottom - 8 - 62 / (1 + i / 7) + wiggle[i % 13] / 3,
        )
        for i in range(61)
    ]
    d.line((left, y), (left, bottom), (x + width, bottom))
    d.text(left - 8, y + 12, "loss", size=12, anchor="end")
    d.text(x + width, bottom + 16, "steps", size=12, anchor="end")
    d.line(*points, stroke="#B9C0C9", stroke_width=8)
    d.line(*points, stroke="#222222", stroke_width=1.5, dashed=True)
    legend = x + width - 306
    d.line((legend, y + 10), (legend + 34, y + 10), stroke="#B9C0C9", stroke_width=8)
    d.text(legend + 42, y + 14, "one process", size=12, anchor="start", fill=MUTED)
    legend += 150
    d.line((legend, y + 10), (legend + 34, y + 10), stroke_width=1.5, dashed=True)
    d.text(legend + 42, y + 14, many, size=12, anchor="start", fill=MUTED)


# ---- the picture of the README: one model, cut in seven ways -------------------------

MARGIN, GAP, WAY_W, WAY_H = 16, 6, 146, 194
MAP_W = 7 * WAY_W + 6 * GAP + 2 * MARGIN
MIDDLE = MAP_W / 2
WAYS = 152  # y of the cards' top
END = WAYS + WAY_H + 36  # y where the ways meet again
MAP_H = END + 72
SIDE = 84  # a square is cut: four bars of 21, or of 18 with gaps of 4
# (rank, box, radius of the corners) for each part of a square
ROWS = [(i, (0, 21 * i, SIDE, 21), 0) for i in range(4)]
COLUMNS = [(i, (21 * i, 0, 21, SIDE), 0) for i in range(4)]
QUADRANTS = [(i, (42 * (i % 2), 42 * (i // 2), 42, 42), 0) for i in range(4)]
LAYERS = [(i, (0, 22 * i, SIDE, 18), 4) for i in range(4)]
TOKEN_PARTS = [(i, (22 * i, 0, 18, SIDE), 0) for i in range(4)]
EXPERTS = [(i, (44 * (i % 2), 44 * (i // 2), 40, 40), 10) for i in range(4)]
CELLS = [(i, (21 * i, 22 * j, 21, 18), 0) for j in range(4) for i in range(4)]


def course_map() -> Drawing:
    """Draw one model and the seven ways in which the course cuts it."""
    d = Drawing(
        MAP_W,
        MAP_H,
        title="One model, cut in seven ways, and always the same loss curve",
        description="Four ranks train one model. Cut by batch: DP and DDP. By "
        "optimizer state: ZeRO-1 and ZeRO-2. By weight: FSDP. By column: tensor "
        "parallel. By layer: pipeline. By token: context parallel. By expert: expert "
        "parallel. Every way leads to the same loss curve.",
    )
    cards = (
        ("by batch", "DP, DDP", "of the batch", ROWS),
        ("by optimizer state", "ZeRO-1, ZeRO-2", "of the optimizer state", QUADRANTS),
        ("by weight", "FSDP", "of every layer's weights", CELLS),
        ("by column", "tensor parallel", "of every layer's columns", COLUMNS),
        ("by layer", "pipeline", "of the layers", LAYERS),
        ("by token", "context parallel", "of every sequence", TOKEN_PARTS),
        ("by expert", "expert parallel", "of every layer's experts", EXPERTS),
    )
    for i in range(len(cards)):
        x = MARGIN + i * (WAY_W + GAP) + WAY_W / 2
        _way(d, (MIDDLE, 118), (x, WAYS))
        _way(d, (MIDDLE, END), (x, WAYS + WAY_H))
    for i, (cut, name, share, glyph) in enumerate(cards):
        with d.shifted(MARGIN + i * (WAY_W + GAP), WAYS):
            d.rect(0, 0, WAY_W, WAY_H, fill=PANEL, stroke=PANEL_EDGE, radius=8)
            d.text(WAY_W / 2, 22, cut, size=12)
            with d.shifted((WAY_W - SIDE) / 2, 36):
                _glyph(d, glyph, [rank_color(rank) for rank in range(4)], "0123")
            d.text(WAY_W / 2, 143, name, size=14, bold=True)
            d.text(WAY_W / 2, 163, "each rank: a quarter", size=11, fill=MUTED)
            d.text(WAY_W / 2, 179, share, size=11, fill=MUTED)
    _model(d)
    _curve(d)
    return d


def _model(d: Drawing) -> None:
    """Draw the undivided training in grey: batch, layers, optimizer state."""
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
    """Draw a square that is cut into parts; `names` and `fills` are by rank."""
    for rank, box, radius in parts:
        d.block(*box, names[rank], fill=fills[rank], radius=radius)


def _curve(d: Drawing) -> None:
    """Draw the common result of all ways: one loss curve on top of another."""
    left, bottom = MIDDLE - 190, END + 58
    d.line((left, bottom - 50), (left, bottom), (left + 112, bottom))
    points = [(left + 6 + 5 * i, bottom - 6 - 38 / (1 + i / 4)) for i in range(21)]
    d.line(*points, stroke="#B9C0C9", stroke_width=7)
    d.line(*points, stroke_width=1.5, dashed=True)
    words = "every time the same loss curve"
    d.text(left + 132, bottom - 18, words, anchor="start", bold=True, size=14)


IMAGES = {"00_one_or_four.svg": one_or_four, "course_map.svg": course_map}
