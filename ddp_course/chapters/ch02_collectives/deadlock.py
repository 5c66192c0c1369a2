"""Two ranks that wait for each other, chapter 02, and two cures."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import INK, MUTED, PANEL, PANEL_EDGE, rank_color

MARGIN, GAP, CARD_W, CARD_H = 12, 12, 230, 182
CALL_W, CALL_H, LEFT, RIGHT = 86, 26, 10, 134  # a call, and the two ranks' left edges


def deadlock() -> Drawing:
    """Draw two ranks that both send first, and two ways out."""
    tales = (
        (
            "both send first",
            ("send to 1", "recv from 1"),
            ("send to 0", "recv from 0"),
            "each waits until the other receives",
        ),
        (
            "cure 1: one receives first",
            ("send to 1", "recv from 1"),
            ("recv from 0", "send to 0"),
            "every send meets its recv",
        ),
        (
            "cure 2, not on NCCL: isend",
            ("isend to 1", "recv from 1", "wait"),
            ("isend to 0", "recv from 0", "wait"),
            "both receive, then wait",
        ),
    )
    d = Drawing(
        3 * CARD_W + 2 * GAP + 2 * MARGIN,
        252,
        title="A deadlock of two ranks, and two cures",
        description="Left: ranks 0 and 1 both call send first. Each send waits until "
        "the other rank receives, so neither ever comes to its recv. Middle: rank 1 "
        "receives first, and both messages arrive. Right: both call isend, which "
        "returns at once, then recv, and then wait for what they have sent; not on "
        "NCCL.",
    )
    for i, (name, *calls, outcome) in enumerate(tales):
        with d.shifted(MARGIN + i * (CARD_W + GAP), 0):
            d.rect(0, 36, CARD_W, CARD_H, stroke=PANEL_EDGE, radius=8)
            d.text(CARD_W / 2, 24, name, bold=True)
            _calls(d, calls, stuck=i == 0)
            d.text(CARD_W / 2, 240, outcome, size=12, fill=MUTED)
    return d


def _calls(d: Drawing, calls: Sequence[Sequence[str]], stuck: bool) -> None:
    """Draw what two ranks call, downwards in time, and the messages between them."""
    ys = {}
    for rank, (left, names) in enumerate(zip((LEFT, RIGHT), calls, strict=True)):
        d.block(left, 46, CALL_W, 24, f"rank {rank}", fill=rank_color(rank), size=12)
        for i, name in enumerate(names):
            y = 82 + 44 * i
            ys[rank, name.partition(" ")[0].lstrip("i")] = y + CALL_H / 2
            if stuck and i == 0:  # it hangs here
                d.hatch(left - 4, y - 4, CALL_W + 8, CALL_H + 8)
            _call(d, left, y, name, never=stuck and i > 0)
    near, far = LEFT + CALL_W + 4, RIGHT - 4
    for src, (x0, x1) in enumerate(((near, far), (far, near))):
        start, end = (x0, ys[src, "send"]), (x1, ys[1 - src, "recv"])
        if stuck:
            d.line(start, end, stroke=PANEL_EDGE, dashed=True)
        else:
            d.arrow(start, end, stroke_width=1.8)


def _call(d: Drawing, x: float, y: float, name: str, never: bool) -> None:
    fill, color = ("#FFFFFF", MUTED) if never else (PANEL, INK)
    d.rect(x, y, CALL_W, CALL_H, fill=fill, radius=4, dashed=never)
    d.text(x + CALL_W / 2, y + 17, name, size=12, fill=color)
    if never:
        d.text(x + CALL_W / 2, y + 46, "never called", size=12, fill=MUTED)


IMAGES = {"02_deadlock.svg": deadlock}
