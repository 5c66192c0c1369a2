"""The figures of chapter 04: DataParallel's iteration, move by move; DP beside DDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_course.lab.draw.drawing import Drawing, Point
from ddp_course.lab.draw.grid import draw_halo
from ddp_course.lab.draw.steps import count
from ddp_course.lab.palette import (
    MUTED,
    PANEL,
    PANEL_EDGE,
    darker,
    rank_color,
    text_color,
)

REPLICAS = 4
WIDTH, HEIGHT, MARGIN, TOP = 488, 342, 16, 66
BIG, SMALL, HIGH = 206, 200, 230  # widths of replica 0's panel and the others'; height
ROW, CELL_W, CELL_H, LAYER = 32, 28, 22, 14
SMALL_H = (HIGH - 2 * 10) / 3


@dataclass(frozen=True)
class DPStep:
    """One move of DataParallel, and the tensors of every replica after it.

    Attributes:
        name, says: the move's name, and a description.
        at_0: replica 0's tensors: name -> the replicas whose parts are there.
        at_others: names of each other replica's tensors.
        sent: the tensor that is sent, a name in `at_0`.
        way: the direction in which it is sent: "out", "back" or "both".
        through: parameters and gradients that went through replica 0 so far, in S.
    """

    name: str
    says: str
    at_0: dict[str, Sequence[int]]
    at_others: tuple[str, ...]
    sent: str = ""
    way: str = ""
    through: int = 0


ALL, OWN = range(REPLICAS), (0,)
BEGIN = {"rows": ALL, "model": OWN, "optimizer": OWN}
APPLIED = {**BEGIN, "logits": OWN}
GATHERED = {**BEGIN, "logits": ALL}
LOST = {**GATHERED, "loss": OWN}
DP_STEPS = (
    DPStep("at the start", "all there is lies with replica 0", BEGIN, ()),
    DPStep("scatter", "each replica gets its rows", BEGIN, ("rows",), "rows", "out"),
    DPStep(
        "replicate", "each gets a copy of the model",
        BEGIN, ("rows", "model"), "model", "out", 3,
    ),
    DPStep(
        "parallel_apply", "four threads run forward; nothing is sent",
        APPLIED, ("rows", "model", "logits"), through=3,
    ),
    DPStep(
        "gather", "the outputs come together",
        GATHERED, ("rows", "model", "logits"), "logits", "back", 3,
    ),
    DPStep(
        "loss", "replica 0 alone computes it, from all outputs",
        LOST, ("rows", "model", "logits"), through=3,
    ),
    DPStep(
        "backward", "gradients of outputs go out, of parameters come back",
        {**LOST, "gradients": ALL}, ("rows", "model", "logits", "gradients"),
        "gradients", "both", 6,
    ),
    DPStep(
        "update", "replica 0's optimizer changes the one true model",
        {"model": OWN, "optimizer": OWN, "gradients": ALL}, (), through=6,
    ),
)  # fmt: skip


def dp_step(step: int = 0) -> Drawing:
    """Draw an iteration of DataParallel with four replicas, after `step` moves.

    0 is the start; the moves 1 to 7 are scatter, replicate, parallel_apply, gather,
    loss, backward and update. Raises ValueError for any other step. Chapter 04.
    """
    now = DP_STEPS[count("step", step, 0, len(DP_STEPS) - 1)]
    d = Drawing(
        WIDTH, HEIGHT, title=f"DataParallel: {now.name}", description=_in_words(now)
    )
    head = f"{step}  {now.name}" if step else now.name
    d.text(MARGIN, 26, head, size=15, bold=True, anchor="start")
    d.text(MARGIN, 47, now.says, size=12, anchor="start", fill=MUTED)
    _replica_0(d, now)
    right = WIDTH - MARGIN - SMALL
    for k in range(1, REPLICAS):
        y = TOP + (k - 1) * (SMALL_H + 10)
        _other(d, now, k, right, y)
        ends = (MARGIN + BIG + 8, y + SMALL_H / 2), (right - 8, y + SMALL_H / 2)
        if now.way:
            d.arrow(*(ends[::-1] if now.way == "back" else ends), stroke_width=2,
                    both=now.way == "both")  # fmt: skip
    y = TOP + HIGH + 22
    amount = f"{now.through} S" if now.through else "0"
    words = f"parameters and gradients that have passed replica 0 so far: {amount}"
    d.text(MARGIN, y, words, size=12, anchor="start", bold=bool(now.through))
    words = "S: the bytes of all parameters. Hatched: what has just been sent."
    d.text(MARGIN, y + 17, words, size=11, anchor="start", fill=MUTED)
    return d


def _replica_0(d: Drawing, now: DPStep) -> None:
    """Draw replica 0's tensors: a line for each kind, a cell for each part."""
    _panel(d, MARGIN, TOP, BIG, HIGH, 0)
    x = MARGIN + 74
    for i, what in enumerate(("rows", "model", "logits", "loss", "gradients")):
        y = TOP + 34 + i * ROW
        d.text(MARGIN + 8, y + 15, what, size=11, anchor="start", fill=MUTED)
        parts = now.at_0.get(what, ())
        if what == "gradients":
            _sum(d, x, y, parts, what == now.sent)
            continue
        if what == now.sent and what == "model":
            draw_halo(d, x, y, CELL_W, CELL_H)
        elif what == now.sent:  # the other replicas' parts
            draw_halo(d, x + 32, y, 3 * 32 - 4, CELL_H)
        for place in range(1 if what in ("model", "loss") else REPLICAS):
            _cell(d, x + place * 32, y, CELL_H, place, place in parts)
        if what == "model":
            d.text(x + 38, y + 15, "+ optimizer", size=11, anchor="start")


def _sum(d: Drawing, x: float, y: float, parts: Sequence[int], travels: bool) -> None:
    """Draw a sum of gradients as a stack of the replicas' parts."""
    if not parts:
        d.rect(x, y, CELL_W, CELL_H, fill="#FFFFFF", stroke=PANEL_EDGE)
        return
    if travels:
        draw_halo(d, x, y + LAYER, CELL_W, LAYER * (REPLICAS - 1))
    for place in parts:
        _cell(d, x, y + place * LAYER, LAYER, place, True)
    d.text(x + 38, y + 2 * LAYER + 4, "added up", size=11, anchor="start")


def _other(d: Drawing, now: DPStep, k: int, x: float, y: float) -> None:
    _panel(d, x, y, SMALL, SMALL_H, k)
    if not now.at_others:
        d.text(x + 32, y + 46, "nothing", size=11, anchor="start", fill=MUTED)
    for i, what in enumerate(now.at_others):
        left = x + 8 + i * 47
        if what == now.sent:
            draw_halo(d, left, y + 34, 43, CELL_H)
        d.rect(
            left, y + 34, 43, CELL_H, fill=rank_color(k), stroke=darker(rank_color(k))
        )
        label, ink = what.replace("gradients", "grad."), text_color(rank_color(k))
        d.text(left + 21.5, y + 49, label, size=11, fill=ink)


def _panel(d: Drawing, x: float, y: float, width: float, height: float, k: int) -> None:
    d.rect(x, y, width, height, fill=PANEL, stroke=PANEL_EDGE, radius=6)
    d.block(x + 6, y + 6, 20, 18, f"{k}", fill=rank_color(k), size=12)
    d.text(x + 32, y + 20, f"replica {k}", size=12, anchor="start", bold=True)


def _cell(d: Drawing, x: float, y: float, height: float, part: int, here: bool) -> None:
    """Draw replica `part`'s part, or an empty place for it."""
    if here:
        fill = rank_color(part)
        d.block(x, y, CELL_W, height, f"{part}", fill=fill, size=12, radius=0)
    else:
        d.rect(x, y, CELL_W, height, fill="#FFFFFF", stroke=PANEL_EDGE)


def _in_words(now: DPStep) -> str:
    has = ", ".join(
        what + (" of all replicas" if len(parts) > 1 else "")
        for what, parts in now.at_0.items()
    )
    others = ", ".join(now.at_others) or "nothing"
    return (
        f"{now.name}: {now.says}. Replica 0 has {has}; each of the replicas 1 to 3 has "
        f"{others}. {now.through} S of parameters and gradients have passed replica 0."
    )


# ---- a star, and a ring of equals ---------------------------------------------------

CARD_W, CARD_H, SIDE_W, SIDE_H = 114, 72, 420, 352
STAR = ((210, 116), (70, 262), (210, 262), (350, 262))
RING = ((98, 116), (322, 116), (322, 262), (98, 262))


def dp_and_ddp() -> Drawing:
    """Draw the paths of bytes: a star in DP, a ring in DDP. Chapter 04."""
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
    """Draw a replica and its tensors around the point `at`."""
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
    """Draw an arrow along the ring from card `a` to card `b`, with its bytes."""
    (x0, y0), (x1, y1) = a, b
    ux, uy = (x1 > x0) - (x1 < x0), (y1 > y0) - (y1 < y0)
    cut_x, cut_y = ux * (CARD_W / 2 + 6), uy * (CARD_H / 2 + 6)
    d.arrow((x0 + cut_x, y0 + cut_y), (x1 - cut_x, y1 - cut_y), stroke_width=2)
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    x += 26 * abs(uy) * (1 if x > SIDE_W / 2 else -1)
    d.text(x, y - 9 * abs(ux) + 4 * abs(uy), "3/2 S", size=12)


IMAGES = {"04_dp_vs_ddp.svg": dp_and_ddp}
