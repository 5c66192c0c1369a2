"""The figures of chapter 16: a ring's keys, and the work of each rank."""

from __future__ import annotations

from ddp_course.context_parallel.assignment import Positions, assign, pairs
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import MUTED, PANEL, PANEL_EDGE, darker, rank_color

LENGTH, CELL = 16, 11  # positions of the drawn mask; pixels per position
MARGIN, BAR = 12, 20
STEPS_W, STEPS_H, BLOCK_W, BLOCK_H = 132, 74, 86, 30


def around(ranks: int = 4) -> Drawing:
    """Draw which keys and values each rank has in each step of a ring. Chapter 16."""
    left, top = 150, 76
    width = left + ranks * STEPS_W - (STEPS_W - BLOCK_W) + 40
    height = top + ranks * STEPS_H - 8
    has = [[(rank - step) % ranks for step in range(ranks)] for rank in range(ranks)]
    words = (
        f"rank {rank} has the keys of rank {', then '.join(map(str, row))}"
        for rank, row in enumerate(has)
    )
    d = Drawing(
        width,
        height,
        title="Keys and values go around a ring",
        description=f"In {ranks} steps {'; '.join(words)}.",
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    for step in range(ranks):
        x = left + step * STEPS_W + BLOCK_W / 2
        d.text(x, 56, f"step {step}", size=12, fill=MUTED)
    for rank, row in enumerate(has):
        y = top + rank * STEPS_H
        color = rank_color(rank)
        d.block(MARGIN, y, 108, BLOCK_H, f"queries of {rank}", fill=color)
        for step, source in enumerate(row):
            x = left + step * STEPS_W
            d.block(
                x, y, BLOCK_W, BLOCK_H, f"keys of {source}", fill=rank_color(source)
            )
            if step + 1 < ranks:
                start = x + BLOCK_W - 8, y + BLOCK_H + 3
                if rank + 1 < ranks:
                    end = x + STEPS_W + 8, y + STEPS_H - 4
                    d.arrow(start, end)
                else:  # the last rank passes its keys to rank 0
                    d.arrow((x + STEPS_W + 20, top - 16), (x + STEPS_W + 20, top - 3))
    return d


def shares(
    assignment: str = "zigzag", ranks: int = 4, step: int | None = None
) -> Drawing:
    """Draw which parts of a causal mask each rank computes, and how many pairs.

    A row is a query, a column a key. A cell has the colour of the query's rank if the
    query sees the key; with `step`, only if a ring computes the pair in that step.
    Chapter 16.
    """
    assigned = assign(LENGTH, ranks, assignment)
    owner = {p: rank for rank, its in enumerate(assigned) for some in its for p in some}
    side, left, top = LENGTH * CELL, 28, 62
    below = top + side + 30
    width, height = left + side + MARGIN, below + ranks * BAR + 6
    counts = [_pairs_of(assigned, rank, step) for rank in range(ranks)]
    when = "all steps" if step is None else f"step {step}"
    words = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
    d = Drawing(
        width,
        height,
        title=f"{assignment}, {when}",
        description=f"{LENGTH} positions over {ranks} ranks, {assignment}. Pairs of "
        f"query and key in {when}: {words}.",
    )
    d.text(MARGIN, 22, d.title, size=13, bold=True, anchor="start")
    d.text(left, 44, "keys", size=11, anchor="start", fill=MUTED)
    d.rect(left, top - 10, side, side, fill=PANEL, stroke=PANEL_EDGE)
    for query in range(LENGTH):
        rank, y = owner[query], top - 10 + query * CELL
        d.text(left - 8, y + 9, f"{rank}", size=11, anchor="end")
        for key in range(query + 1):
            if step is None or (rank - step) % ranks == owner[key]:
                look = {"fill": rank_color(rank), "stroke": darker(rank_color(rank))}
                d.rect(left + key * CELL, y, CELL, CELL, **look)
    longest, mean = max(*counts, 1), sum(counts) / ranks
    d.text(MARGIN, below - 8, "pairs", size=11, anchor="start", fill=MUTED)
    room = side - 40
    for rank, count in enumerate(counts):
        y, color = below + rank * BAR, rank_color(rank)
        d.text(left - 8, y + 12, f"{rank}", size=11, anchor="end")
        if count:
            long = room * count / longest
            d.rect(left, y, long, BAR - 5, fill=color, stroke=darker(color))
        d.text(left + side, y + 12, f"{count}", size=11, anchor="end")
    x = left + room * mean / longest
    d.line((x, below - 4), (x, below + ranks * BAR - 2), dashed=True)
    return d


def _pairs_of(assigned: list[Positions], rank: int, step: int | None) -> int:
    ranks = range(len(assigned))
    sources = ranks if step is None else [(rank - step) % len(assigned)]
    keys = sorted(p for source in sources for some in assigned[source] for p in some)
    return sum(pairs(queries, keys) for queries in assigned[rank])


IMAGES = {"16_long_sequences.svg": around}
