"""The figures of chapter 02: buffers before and after a collective; a deadlock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddp_course.collectives.catalog import PLANS
from ddp_course.collectives.plan import Plan
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.grid import (
    Look,
    complete,
    draw_cell,
    labels,
    look_of,
    shares_columns,
)
from ddp_course.lab.draw.steps import plan_named
from ddp_course.lab.palette import INK, MUTED, PANEL, PANEL_EDGE, rank_color
from ddp_course.theory.checks import check_choice

MARGIN = 12
NAME_W, ARROW_W, ROW_GAP, GAP, TOP = 26, 30, 7, 3, 18
HEADER, PAD, CARD_GAP = 52, 9, 7  # for the drawing of all eight collectives
COLLECTIVES = {
    "broadcast": "one rank's buffer to all",
    "scatter": "one rank's chunks, one to each",
    "gather": "a chunk of each, to one rank",
    "all_gather": "a chunk of each, to all",
    "reduce": "the sum, to one rank",
    "reduce_scatter": "the sum, a chunk to each",
    "all_reduce": "the sum, to all",
    "all_to_all": "0→1: rank 0's chunk for rank 1",
}


def before_after(name: str, world_size: int = 4) -> Drawing:
    """Draw every rank's buffer before and after a collective.

    `name` is a collective, such as "all_reduce", or a plan of the catalog. Raises
    ValueError for another name and for a world_size outside 1 to 8. Chapter 02.
    """
    plan = _plan(name, world_size)
    inner = _transition(plan, 160, 24)
    d = Drawing(
        max(320, inner.width + 2 * MARGIN),
        inner.height + 70,
        title=f"{_short(plan)} among {world_size} ranks, before and after",
        description=_in_words(plan),
    )
    short = _short(plan)
    d.text(MARGIN, 26, short, size=15, bold=True, anchor="start")
    d.text(MARGIN, 45, COLLECTIVES.get(short, ""), size=12, anchor="start", fill=MUTED)
    d.place(inner, MARGIN, 56)
    return d


def collectives(world_size: int = 4) -> Drawing:
    """Draw the buffers before and after each of chapter 02's eight collectives.

    Raises ValueError for a world_size outside 1 to 8.
    """
    plans = [_plan(name, world_size) for name in COLLECTIVES]
    inner = [_transition(plan, 80, 20, label_width=28) for plan in plans]
    columns = 2  # more would be wider than a narrow page
    rows = [inner[k : k + columns] for k in range(0, len(inner), columns)]
    widths = [max(d.width for d in column) for column in zip(*rows, strict=True)]
    highs = [max(d.height for d in row) for row in rows]
    d = Drawing(
        sum(widths) + columns * (2 * PAD + CARD_GAP) - CARD_GAP + 2 * MARGIN,
        sum(highs) + len(rows) * (HEADER + PAD + CARD_GAP) - CARD_GAP + 2 * MARGIN,
        title=f"Eight collectives among {world_size} ranks, before and after",
        description=" ".join(map(_in_words, plans)),
    )
    for i, (name, says) in enumerate(COLLECTIVES.items()):
        row, column = divmod(i, columns)
        x = MARGIN + sum(widths[:column]) + column * (2 * PAD + CARD_GAP)
        y = MARGIN + sum(highs[:row]) + row * (HEADER + PAD + CARD_GAP)
        size = widths[column] + 2 * PAD, highs[row] + HEADER + PAD
        d.rect(x, y, *size, stroke=PANEL_EDGE, radius=8)
        d.text(x + PAD, y + 22, name, size=14, bold=True, anchor="start")
        d.text(x + PAD, y + 40, says, size=11, anchor="start", fill=MUTED)
        d.place(inner[i], x + PAD, y + HEADER)
    return d


def _transition(
    plan: Plan, buffer_width: float, least_height: float, label_width: float = 36
) -> Drawing:
    """Draw every rank's buffer before and after, side by side."""
    ranks, everything = range(plan.world_size), range(plan.chunks)
    shown = [
        [everything if shares_columns(plan) else sorted(has[r]) for r in ranks]
        for has in (plan.start, plan.end)
    ]
    most = max(len(row) for side in shown for row in side)
    if any(labels(plan)):
        buffer_width = max(buffer_width, most * label_width)
    look = look_of(plan, buffer_width, least_height)
    width, high = most * (look.width + GAP) - GAP, look.height + ROW_GAP
    d = Drawing(
        NAME_W + 2 * width + ARROW_W,
        TOP + plan.world_size * high,
        title=f"{plan.name}: before and after",
    )
    for after, word in enumerate(("before", "after")):
        left = NAME_W + after * (width + ARROW_W)
        d.text(left, 11, word, size=11, anchor="start", fill=MUTED)
        for rank in ranks:
            with d.shifted(left, TOP + rank * high):
                _row(d, look, plan, rank, shown[after][rank], bool(after))
    for rank in ranks:
        y = TOP + rank * high + look.height / 2 - 10
        d.block(0, y, 20, 20, f"{rank}", fill=rank_color(rank), size=12)
    middle = TOP + (plan.world_size * high - ROW_GAP) / 2
    x = NAME_W + width
    d.arrow((x + 8, middle), (x + ARROW_W - 8, middle), stroke_width=2)
    return d


def _row(
    d: Drawing, look: Look, plan: Plan, rank: int, chunks: Iterable[int], after: bool
) -> None:
    """Draw a rank's chunks from the origin on; chunks that it lacks are blank."""
    names, own = labels(plan), (plan.end if after else plan.start)[rank]
    for i, chunk in enumerate(chunks):
        everyone = complete(plan, chunk)
        has = () if chunk not in own else everyone if after else (rank,)
        x, whole = i * (look.width + GAP), has == everyone
        draw_cell(d, x, 0, look, has, whole=whole, label=names[chunk])


def _plan(name: str, world_size: int) -> Plan:
    """Return the plan `name` of the catalog, or the first plan of that collective."""
    first = {plan.partition(",")[0]: plan for plan in reversed(PLANS)}
    check_choice("name", name, first | {plan: plan for plan in PLANS})
    return plan_named(first.get(name, name), world_size)


def _short(plan: Plan) -> str:
    return plan.name.partition(",")[0]


def _in_words(plan: Plan) -> str:
    """Describe every rank's buffer before and after."""
    names = labels(plan)

    def chunks(which: frozenset[int]) -> str:
        if len(which) == plan.chunks:
            return "everything"
        return ", ".join(names[c] or f"chunk {c}" for c in sorted(which)) or "nothing"

    ranks = range(plan.world_size)
    before = "; ".join(f"rank {r}: {chunks(plan.start[r])}" for r in ranks)
    after = "; ".join(f"rank {r}: {chunks(plan.end[r])}" for r in ranks)
    added = any(len(complete(plan, c)) > 1 for c in range(plan.chunks))
    what = ", added over all ranks" if added else ""
    return f"{_short(plan)}. Before: {before}. After{what}: {after}."


# ---- two ranks that wait for each other, and two cures ------------------------------

CARD_W, CARD_H = 230, 182  # MARGIN is the gap between two cards
CALL_W, CALL_H, LEFT, RIGHT = 86, 26, 10, 134  # a call, and the two ranks' left edges


def deadlock() -> Drawing:
    """Draw two ranks that both send first, and two cures. Chapter 02."""
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
        3 * CARD_W + 4 * MARGIN,
        252,
        title="A deadlock of two ranks, and two cures",
        description="Left: ranks 0 and 1 both call send first. Each send waits until "
        "the other rank receives, so neither ever comes to its recv. Middle: rank 1 "
        "receives first, and both messages arrive. Right: both call isend, which "
        "returns at once, then recv, and then wait for what they have sent; not on "
        "NCCL.",
    )
    for i, (name, *calls, outcome) in enumerate(tales):
        with d.shifted(MARGIN + i * (CARD_W + MARGIN), 0):
            d.rect(0, 36, CARD_W, CARD_H, stroke=PANEL_EDGE, radius=8)
            d.text(CARD_W / 2, 24, name, bold=True)
            _calls(d, calls, stuck=i == 0)
            d.text(CARD_W / 2, 240, outcome, size=12, fill=MUTED)
    return d


def _calls(d: Drawing, calls: Sequence[Sequence[str]], stuck: bool) -> None:
    """Draw the calls of two ranks, from top to bottom, and their messages."""
    ys = {}
    for rank, (left, names) in enumerate(zip((LEFT, RIGHT), calls, strict=True)):
        d.block(left, 46, CALL_W, 24, f"rank {rank}", fill=rank_color(rank), size=12)
        for i, name in enumerate(names):
            y = 82 + 44 * i
            ys[rank, name.partition(" ")[0].lstrip("i")] = y + CALL_H / 2
            if stuck and i == 0:  # the call that hangs
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


IMAGES = {"02_collectives.svg": collectives, "02_deadlock.svg": deadlock}
