"""DP beside DDP: a star around replica 0, a ring of equals. Chapter 04."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_course.lab.draw.drawing import Drawing, Point
from ddp_course.lab.palette import MUTED, PANEL, PANEL_EDGE, rank_color

MARGIN, REPLICAS = 16, 4
CARD_W, CARD_H, SIDE_W, SIDE_H = 114, 72, 420, 352
STAR = ((210, 116), (70, 262), (210, 262), (350, 262))
RING = ((98, 116), (322, 116), (322, 262), (98, 262))


def dp_and_ddp() -> Drawing:
    """Draw where the bytes pass: in DP a star, in DDP a ring. Chapter 04."""
    d = Drawing(
        SIDE_W + 2 * MARGIN,
        2 * SIDE_H + 3 * MARGIN + 42,
        title="DataParallel is a star around replica 0, DDP a ring of equals",
        description="Above, DataParallel: one process with four threads. Replica 0 has "
        "the model and the optimizer. It exchanges S out and S back with each of the "
        "replicas 1, 2 and 3, which have copies for one step: 6 S pass replica 0. "
        "Below, DistributedDataParallel: four processes in a ring. Each has a model, "
        "an optimizer and rows of its own, and sends 3/2 S to the next. Together both "
        "carry 6 S.",
    )
    with d.shifted(MARGIN, MARGIN):
        cost = "6 S pass replica 0: 3 S out, 3 S in"
        _side(d, "DataParallel", "one process, four threads", cost)
        for place in STAR[1:]:
            _out_and_back(d, STAR[0], place)
        _card(d, 0, STAR[0], ("model", "optimizer", "all outputs"))
        for k, place in enumerate(STAR[1:], start=1):
            _card(d, k, place, ("a copy", "of the model", "for one step"))
        d.text(STAR[1][0] + 4, 186, "S out, S back", size=12)
        d.text(STAR[3][0] - 4, 186, "S out, S back", size=12)
        for y, words in ((202, "S out,"), (216, "S back")):  # between two arrows
            d.text(STAR[2][0] + 8, y, words, size=12, anchor="start")
    with d.shifted(MARGIN, 2 * MARGIN + SIDE_H):
        cost = "3 S pass each rank: 3/2 S out, 3/2 S in"
        _side(d, "DistributedDataParallel", "four processes", cost)
        for k in range(REPLICAS):
            _next(d, RING[k], RING[(k + 1) % REPLICAS])
        for k, place in enumerate(RING):
            _card(d, k, place, ("model", "optimizer", "own outputs"))
        d.text(SIDE_W / 2, 193, "everybody does the same", size=12)
    y = 2 * (SIDE_H + MARGIN) + 20
    for line in (
        "Parameters and gradients of one step, four replicas;",
        "S: the bytes of all parameters. Together both carry 6 S.",
    ):
        d.text(MARGIN, y, line, size=12, anchor="start", fill=MUTED)
        y += 18
    return d


def _side(d: Drawing, name: str, what: str, cost: str) -> None:
    d.rect(0, 0, SIDE_W, SIDE_H, stroke=PANEL_EDGE, radius=8)
    d.text(SIDE_W / 2, 28, name, size=15, bold=True)
    d.text(SIDE_W / 2, 48, what, size=12, fill=MUTED)
    d.text(SIDE_W / 2, SIDE_H - 20, cost, bold=True)


def _card(d: Drawing, k: int, at: Point, has: Sequence[str]) -> None:
    """Draw a replica around the point `at`, and what it has."""
    x, y = at[0] - CARD_W / 2, at[1] - CARD_H / 2
    d.rect(x, y, CARD_W, CARD_H, fill=PANEL, stroke=PANEL_EDGE, radius=6)
    d.block(x + 6, y + CARD_H / 2 - 12, 20, 24, f"{k}", fill=rank_color(k))
    for i, line in enumerate(has):
        d.text(x + 31, y + 22 + 18 * i, line, size=11, anchor="start")


def _out_and_back(d: Drawing, a: Point, b: Point) -> None:
    """Draw an arrow with two heads from card `a` down to card `b`."""
    (x0, y0), (x1, y1) = a, b
    shift = 0.28 * CARD_W * ((x1 > x0) - (x1 < x0))
    start, end = (x0 + shift, y0 + CARD_H / 2 + 5), (x1, y1 - CARD_H / 2 - 5)
    d.arrow(start, end, stroke_width=2, both=True)


def _next(d: Drawing, a: Point, b: Point) -> None:
    """Draw an arrow along the ring from card `a` to card `b`, with what it carries."""
    (x0, y0), (x1, y1) = a, b
    ux, uy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    cut_x, cut_y = ux * (CARD_W / 2 + 6), uy * (CARD_H / 2 + 6)
    d.arrow((x0 + cut_x, y0 + cut_y), (x1 - cut_x, y1 - cut_y), stroke_width=2)
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    x += 26 * abs(uy) * (1 if x > SIDE_W / 2 else -1)
    d.text(x, y - 9 * abs(ux) + 4 * abs(uy), "3/2 S", size=12)


IMAGES = {"04_dp_vs_ddp.svg": dp_and_ddp}
