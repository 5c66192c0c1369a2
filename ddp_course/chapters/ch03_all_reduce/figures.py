"""The figures of chapter 03: the ring, several nodes, six ways side by side."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from itertools import combinations

from ddp_course.collectives.catalog import PLANS
from ddp_course.collectives.hierarchical import sharded_plan
from ddp_course.collectives.plan import Plan
from ddp_course.lab.draw.drawing import Drawing, Point
from ddp_course.lab.draw.steps import count, draw_legend, in_buffers, in_words, panel
from ddp_course.lab.palette import MUTED, PANEL, PANEL_EDGE, rank_color

MARGIN, GAP, SIDE = 16, 14, 30  # SIDE: width of a rank's block
STEPS_TOP, RADIUS = 36, 66  # for the picture of the ring
PITCH, NODE_H, NODE_GAP = 52, 64, 40  # in the hierarchy
PHASE_TOP, WIDEST, MOST_NODES, MOST_LOCAL = 60, 760, 4, 8


def ring() -> Drawing:
    """Draw the ring all-reduce of four ranks: the ring, and all steps. Chapter 03."""
    plan = PLANS["all_reduce, ring"](4)
    panels = [panel(plan, step) for step in range(plan.steps + 1)]
    wide, high = panels[0].width + 20, panels[0].height + 42
    d = Drawing(
        3 * wide - 20 + 2 * MARGIN,
        STEPS_TOP + 3 * high - 8,
        title="The ring all-reduce among four ranks, step by step",
        description="Four ranks in a ring, each sending to the next. "
        + in_words(plan, plan.transfers),
    )
    with d.shifted(MARGIN + 100, 98):
        _circle(d, 4)
    d.place(panels[0], MARGIN + 2 * wide, STEPS_TOP - 16)
    lines = (
        "Every rank sends to the next, all at the same time.",
        "The buffer is cut into four chunks; a message is one: 1/4 S.",
        "3 steps of reduce-scatter: the sum of each chunk grows",
        "from rank to rank, until rank r has all of chunk r.",
        "3 steps of all-gather: the complete chunks go around once.",
        "So each rank sends 6 × 1/4 S = 3/2 S.",
    )
    for i, line in enumerate(lines):
        bold = i in (0, len(lines) - 1)
        d.text(MARGIN, 216 + 22 * i, line, anchor="start", bold=bold)
    draw_legend(d, plan, MARGIN + wide + 20, 96, short=True)
    phases = (
        ("reduce-scatter: what arrives is added", panels[1:4]),
        ("all-gather: what arrives replaces what was there", panels[4:]),
    )
    for row, (name, drawings) in enumerate(phases, start=1):
        y = STEPS_TOP + row * high
        d.line((MARGIN, y - 14), (d.width - MARGIN, y - 14), stroke=PANEL_EDGE)
        d.text(MARGIN, y + 8, name, size=14, bold=True, anchor="start")
        for column, drawing in enumerate(drawings):
            d.place(drawing, MARGIN + column * wide, y + 20)
    return d


def _circle(d: Drawing, ranks: int) -> None:
    """Draw ranks around the origin, and an arrow from each to the next."""

    def at(turn: float) -> Point:  # 0 at the top, 1 once around
        angle = 2 * math.pi * (turn - 0.25)
        return RADIUS * math.cos(angle), RADIUS * math.sin(angle)

    for rank in range(ranks):
        points = [at((rank + 0.22 + 0.56 * k / 8) / ranks) for k in range(9)]
        d.line(*points[:-1], stroke_width=2)
        d.arrow(points[-3], points[-1], stroke_width=2)
        draw_rank(d, *at(rank / ranks), rank)


def draw_rank(d: Drawing, x: float, y: float, rank: int) -> None:
    """Draw a rank as a square around (x, y)."""
    half = SIDE / 2
    d.block(x - half, y - half, SIDE, SIDE, f"{rank}", fill=rank_color(rank), size=14)


def hierarchy(nnodes: int = 2, nproc_per_node: int = 4) -> Drawing:
    """Draw the phases of a hierarchical all-reduce: inside, between, inside nodes.

    Raises ValueError unless there are 1 to 4 nodes with 1 to 8 ranks each. Chapter 03.
    """
    count("nnodes", nnodes, 1, MOST_NODES)
    count("nproc_per_node", nproc_per_node, 1, MOST_LOCAL)
    inside = in_buffers(Fraction(nproc_per_node - 1, nproc_per_node))
    between = in_buffers(Fraction(2 * (nnodes - 1), nnodes * nproc_per_node))
    phases = (
        ("1  inside: reduce-scatter", f"fast links; each rank sends {inside}"),
        ("2  between nodes: all-reduce", f"slow links; each rank sends {between}"),
        ("3  inside: all-gather", f"fast links; each rank sends {inside}"),
    )
    wide = max(232, nproc_per_node * PITCH + 20)
    columns = 3 if 3 * (wide + GAP) <= WIDEST else 1
    high = PHASE_TOP + nnodes * (NODE_H + NODE_GAP) - NODE_GAP + MARGIN
    d = Drawing(
        columns * (wide + GAP) - GAP + 2 * MARGIN,
        (3 // columns) * high,
        title=f"A hierarchical all-reduce: {nnodes} × {nproc_per_node} ranks",
        description=(
            f"Three phases on {nnodes} nodes of {nproc_per_node} ranks. First a ring "
            f"reduce-scatter inside each node: each rank sends {inside}. Then ranks "
            "with the same local rank all-reduce their part in a ring between the "
            f"nodes, over slow links: each sends {between}. Last a ring all-gather "
            f"inside each node: each sends {inside}."
        ),
    )
    for i, (name, links) in enumerate(phases):
        row, column = divmod(i, columns)
        with d.shifted(MARGIN + column * (wide + GAP), row * high):
            d.text(0, 26, name, bold=True, anchor="start")
            d.text(0, 45, links, size=12, anchor="start", fill=MUTED)
            _nodes(d, nnodes, nproc_per_node, wide, between=i == 1)
    return d


def _nodes(d: Drawing, nnodes: int, size: int, wide: float, between: bool) -> None:
    """Draw nodes below each other and the rings inside or between them."""
    pitch = PITCH if size > 2 else 2 * PITCH  # an arrow with two heads is longer
    xs = [wide / 2 + (i - (size - 1) / 2) * pitch for i in range(size)]
    ys = [PHASE_TOP + 26 + node * (NODE_H + NODE_GAP) for node in range(nnodes)]
    for y in ys:
        d.rect(0, y - 26, wide, NODE_H, fill=PANEL, stroke=PANEL_EDGE, radius=8)
    if between:
        for x in xs:
            _links(d, [(x, y) for y in ys], (11, 0), slow=True)
    else:
        for y in ys:
            _links(d, [(x, y) for x in xs], (0, 13), slow=False)
    for node, y in enumerate(ys):
        for i, x in enumerate(xs):
            draw_rank(d, x, y, node * size + i)


def _links(d: Drawing, places: list[Point], aside: Point, slow: bool) -> None:
    """Draw a ring of ranks that stand in a line; the link back is shifted `aside`."""
    for start, end in zip(places, places[1:], strict=False):
        link(d, *edge_to_edge(start, end), slow=slow, both=len(places) == 2)
    if len(places) > 2:
        (ax, ay), half = aside, SIDE / 2
        ex, ey = (half if ax else 0), (half if ay else 0)  # from centre to edge
        (x0, y0), (x1, y1) = places[-1], places[0]
        turn = [(x + ex + ax, y + ey + ay) for x, y in ((x0, y0), (x1, y1))]
        look = {"stroke_width": 1.2 if slow else 2}
        d.line((x0 + ex, y0 + ey), *turn, dashed="3 3" if slow else False, **look)
        d.arrow(turn[1], (x1 + ex + ax / 11, y1 + ey + ay / 11), **look)


def edge_to_edge(start: Point, end: Point) -> tuple[Point, Point]:
    """Return the ends of a line between two ranks' blocks, from edge to edge."""
    (x0, y0), (x1, y1) = start, end
    dx, dy = x1 - x0, y1 - y0
    cut = (SIDE / 2 + 4) / max(abs(dx), abs(dy))
    return (x0 + cut * dx, y0 + cut * dy), (x1 - cut * dx, y1 - cut * dy)


def link(
    d: Drawing, start: Point, end: Point, *, slow: bool = False, both: bool = False
) -> None:
    """Draw an arrow along a link; a slow link is thin and dashed."""
    if not slow:
        d.arrow(start, end, stroke_width=2, both=both)
        return
    d.line(start, end, stroke_width=1.2, dashed="3 3")
    share = 9 / math.dist(start, end)
    for (x0, y0), (x1, y1) in [(start, end)] + [(end, start)] * both:
        neck = x1 - share * (x1 - x0), y1 - share * (y1 - y0)
        d.arrow(neck, (x1, y1), stroke_width=1.2)


# ---- six ways: who sends to whom, and when -------------------------------------------

CARD_W, CARD_H, FIELD_W, FIELD_TOP = 300, 250, 240, 54
NODES = "hierarchical: 2 nodes"
SQUARE = ((60, 15), (180, 15), (60, 115), (180, 115))
PLACES: dict[str, tuple[Point, ...]] = {  # ranks 0 to 3
    "naive": ((120, 15), (25, 115), (120, 115), (215, 115)),
    "tree": ((120, 3), (55, 62), (185, 62), (185, 127)),
    "halving-doubling": SQUARE,
    "ring": ((60, 15), (180, 15), (180, 115), (60, 115)),
    NODES: SQUARE,
    "shared memory": ((20, 15), (220, 15), (20, 115), (220, 115)),
}
REMARKS = {
    "naive": "everything goes through rank 0",
    "tree": "whole tensors, but few steps",
    "halving-doubling": "halves, then quarters, and back",
    "ring": "always a quarter, to the next",
    NODES: "as little as possible between nodes",
    "shared memory": "only inside a node",
}


def six_ways() -> Drawing:
    """Draw who sends to whom, and when, in six all-reduces of four ranks. Ch. 03."""
    plans = {name: _plan(name) for name in PLACES}
    d = Drawing(
        2 * CARD_W + GAP + 2 * MARGIN,
        3 * CARD_H + 2 * GAP + 2 * MARGIN + 22,
        title="Six ways to all-reduce among four ranks: who sends to whom",
        description=" ".join(_way_in_words(name, plan) for name, plan in plans.items()),
    )
    for i, (name, plan) in enumerate(plans.items()):
        row, column = divmod(i, 2)
        x, y = MARGIN + column * (CARD_W + GAP), MARGIN + row * (CARD_H + GAP)
        with d.shifted(x, y):
            d.rect(0, 0, CARD_W, CARD_H, stroke=PANEL_EDGE, radius=8)
            d.text(CARD_W / 2, 24, name, size=14, bold=True)
            d.text(CARD_W / 2, CARD_H - 34, _cost(plan), size=12)
            d.text(CARD_W / 2, CARD_H - 15, REMARKS[name], size=12, fill=MUTED)
        with d.shifted(x + (CARD_W - FIELD_W) / 2, y + FIELD_TOP):
            _field(d, name, plan)
    words = (
        "Beside an arrow: the steps in which it is used. Dashed: a slow link between "
        "nodes."
    )
    d.text(MARGIN, d.height - 14, words, size=12, anchor="start", fill=MUTED)
    return d


def _plan(name: str) -> Plan | None:
    """Return the plan of an algorithm for four ranks; shared memory has none."""
    if name == NODES:
        return sharded_plan(2, 2)
    make = PLANS.get(f"all_reduce, {name}")
    return make(4) if make else None


def _field(d: Drawing, name: str, plan: Plan | None) -> None:
    places = PLACES[name]
    if name == NODES:
        for y in (-6, 94):
            d.rect(34, y, 172, 42, fill=PANEL, stroke=PANEL_EDGE, radius=8)
    if plan is None:
        d.rect(75, 42, 90, 46, fill=PANEL, stroke=PANEL_EDGE, radius=4)
        d.text(120, 62, "shared", size=12)
        d.text(120, 78, "memory", size=12)
        for x, y in places:
            start, _ = edge_to_edge((x, y), (120, 65))
            end = (70 if x < 120 else 170), (50 if y < 65 else 80)
            link(d, start, end, both=True)
    else:
        for pair, steps in _pairs(plan).items():
            ways = {(t.src, t.dst) for t in plan.transfers if {t.src, t.dst} == {*pair}}
            ends = edge_to_edge(*(places[rank] for rank in min(ways)))
            slow = name == NODES and pair[0] // 2 != pair[1] // 2
            link(d, *ends, slow=slow, both=len(ways) == 2)
            _name_link(d, *ends, _listed(steps))
    for rank, (x, y) in enumerate(places):
        draw_rank(d, x, y, rank)


def _name_link(d: Drawing, start: Point, end: Point, steps: str) -> None:
    """Write, beside the link of two ranks, the steps in which they use it."""
    (x0, y0), (x1, y1) = start, end
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    if y0 == y1:
        d.text(x, y - 9, steps, size=12)
    else:
        y += 4 if x0 == x1 else -3
        left = (x1 - x0) * (y1 - y0) < 0
        x, anchor = (x - 9, "end") if left else (x + 9, "start")
        d.text(x, y, steps, size=12, anchor=anchor)


def _pairs(plan: Plan) -> dict[tuple[int, int], list[int]]:
    """Return {pair of ranks: the steps in which they exchange messages}."""
    pairs = {}
    for pair in combinations(range(plan.world_size), 2):
        steps = {t.step for t in plan.transfers if {t.src, t.dst} == {*pair}}
        if steps:
            pairs[pair] = sorted(steps)
    return pairs


def _listed(steps: list[int]) -> str:
    if len(steps) > 2 and steps == list(range(steps[0], steps[-1] + 1)):
        return f"{steps[0]}–{steps[-1]}"
    return ", ".join(map(str, steps))


def _cost(plan: Plan | None) -> str:
    return f"{plan.steps} steps" if plan else "no message is sent"


def _way_in_words(name: str, plan: Plan | None) -> str:
    pairs = _pairs(plan) if plan else {}
    says = "; ".join(
        f"ranks {a} and {b} in steps {_listed(steps)}"
        for (a, b), steps in pairs.items()
    )
    return f"{name}, {REMARKS[name]}: {says}{'; ' * bool(says)}{_cost(plan)}."


IMAGES = {
    "03_ring.svg": ring,
    "03_hierarchy.svg": partial(hierarchy, 2, 4),
    "03_six_ways.svg": six_ways,
}
