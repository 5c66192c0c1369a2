"""Six ways to all-reduce, side by side: who sends to whom, and when."""

from __future__ import annotations

from itertools import combinations

from ddp_course.chapters.ch03_all_reduce.figures import draw_rank, edge_to_edge, link
from ddp_course.collectives.catalog import PLANS
from ddp_course.collectives.hierarchical import sharded_plan
from ddp_course.collectives.plan import Plan
from ddp_course.lab.draw.drawing import Drawing, Point
from ddp_course.lab.palette import MUTED, PANEL, PANEL_EDGE

MARGIN, GAP, CARD_W, CARD_H, FIELD_W, FIELD_TOP = 16, 14, 300, 250, 240, 54
NODES = "hierarchical: 2 nodes"
SQUARE = ((60, 15), (180, 15), (60, 115), (180, 115))
PLACES: dict[str, tuple[Point, ...]] = {  # of ranks 0 to 3
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
    """Draw who sends to whom in six all-reduces of four ranks, and when."""
    plans = {name: _plan(name) for name in PLACES}
    d = Drawing(
        2 * CARD_W + GAP + 2 * MARGIN,
        3 * CARD_H + 2 * GAP + 2 * MARGIN + 22,
        title="Six ways to all-reduce among four ranks: who sends to whom",
        description=" ".join(_in_words(name, plan) for name, plan in plans.items()),
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
    """Draw the ranks and the links that they use."""
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
    """Write the steps in which two ranks talk beside their link."""
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
    """Return in which steps each pair of ranks talks."""
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


def _in_words(name: str, plan: Plan | None) -> str:
    pairs = _pairs(plan) if plan else {}
    says = "; ".join(
        f"ranks {a} and {b} in steps {_listed(steps)}"
        for (a, b), steps in pairs.items()
    )
    return f"{name}, {REMARKS[name]}: {says}{'; ' * bool(says)}{_cost(plan)}."


IMAGES = {"03_six_ways.svg": six_ways}
