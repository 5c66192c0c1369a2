"""The figures of chapter 01: ranks on nodes, the rendezvous, and process groups."""

from __future__ import annotations

import math
from functools import partial
from itertools import combinations

from ddp_course.lab.draw.drawing import Drawing, Point
from ddp_course.lab.draw.kinds import counted
from ddp_course.lab.draw.steps import count
from ddp_course.lab.palette import MUTED, PANEL, PANEL_EDGE, rank_color

MARGIN, GAP, PAD = 16, 8, 13
BLOCK_W, BLOCK_H = 80, 42  # size of a rank's block
DEVICE_H = 20  # height of the GPU or cores below a rank's block
HEADER = 30  # height of a node's name
WIDEST = 840  # pixels of the widest row of nodes


def cluster(
    nnodes: int, nproc_per_node: int, gpus: int | None = None, *, formula: bool = True
) -> Drawing:
    """Draw every rank of a cluster, on its node and above the device it uses.

    `gpus` is the number of GPUs in each node, by default one for each rank. As in
    `ddp_course.launch`, a node with fewer GPUs than ranks runs them on its CPU. With
    `formula`, the formula of the rank stands below (an exercise asks for it). Ch. 01.
    """
    count("nnodes", nnodes, 1)
    count("nproc_per_node", nproc_per_node, 1)
    on_gpu = gpus is None or count("gpus", gpus, 0) >= nproc_per_node
    world_size = nnodes * nproc_per_node

    columns = nproc_per_node if nproc_per_node <= 3 else math.ceil(nproc_per_node / 2)
    columns = min(columns, 4)
    lines = math.ceil(nproc_per_node / columns)
    node_w = 2 * PAD + columns * (BLOCK_W + GAP) - GAP
    node_h = HEADER + lines * (BLOCK_H + DEVICE_H + 2 * GAP) + PAD - GAP

    fit = max(1, (WIDEST - 2 * MARGIN + MARGIN) // (node_w + MARGIN))
    rows = math.ceil(nnodes / fit)
    per_row = math.ceil(nnodes / rows)
    used = per_row * (node_w + MARGIN) - MARGIN
    width = max(used, 330) + 2 * MARGIN
    top = 34
    height = top + rows * (node_h + MARGIN) + 22 * formula

    d = Drawing(
        width,
        height,
        title=f"{counted(nnodes, 'node')} with {counted(nproc_per_node, 'rank')} each",
        description=f"Ranks 0 to {world_size - 1}. On node n, the rank with local_rank "
        f"l has rank n * {nproc_per_node} + l and uses the "
        f"{'GPU cuda:l' if on_gpu else 'CPU'} of its node.",
    )
    size = f"world_size = {nnodes} × {nproc_per_node} = {world_size}"
    d.text(width / 2, 23, size, bold=True)
    for node_rank in range(nnodes):
        row, column = divmod(node_rank, per_row)
        x = (width - used) / 2 + column * (node_w + MARGIN)
        with d.shifted(x, top + row * (node_h + MARGIN)):
            _node(d, node_rank, nproc_per_node, columns, (node_w, node_h), on_gpu)
    if formula:
        rule = "rank = node_rank × nproc_per_node + local_rank"
        d.text(width / 2, height - 14, rule, size=12, fill=MUTED)
    return d


def _node(
    d: Drawing, node_rank: int, ranks: int, columns: int, size: Point, on_gpu: bool
) -> None:
    width, height = size
    d.rect(0, 0, width, height, fill=PANEL, stroke=PANEL_EDGE, radius=8)
    d.text(width / 2, 20, f"node_rank {node_rank}", bold=True)
    for local_rank in range(ranks):
        rank = node_rank * ranks + local_rank
        line, column = divmod(local_rank, columns)
        x = PAD + column * (BLOCK_W + GAP)
        y = HEADER + line * (BLOCK_H + DEVICE_H + 2 * GAP)
        names = f"rank {rank}", f"local_rank {local_rank}"
        d.block(x, y, BLOCK_W, BLOCK_H, *names, fill=rank_color(rank))
        middle, below = x + BLOCK_W / 2, y + BLOCK_H + GAP
        d.line((middle, y + BLOCK_H), (middle, below), stroke=PANEL_EDGE)
        if on_gpu:
            _device(d, x, below, BLOCK_W, f"cuda:{local_rank}")
        elif column == 0:  # one bar below all ranks, which share the cores
            _device(d, PAD, below, width - 2 * PAD, "CPU cores")


def _device(d: Drawing, x: float, y: float, width: float, name: str) -> None:
    d.rect(x, y, width, DEVICE_H, fill="#FFFFFF", stroke=PANEL_EDGE, radius=3)
    d.text(x + width / 2, y + 14, name, size=11)


def groups(nnodes: int, nproc_per_node: int) -> Drawing:
    """Draw the grid of ranks twice: groups by node, and by local_rank. Chapter 01."""
    count("nnodes", nnodes, 1)
    count("nproc_per_node", nproc_per_node, 1)
    side, left, top = 44, 84, 62
    grid_w, grid_h = nproc_per_node * side, nnodes * side
    panel = left + max(grid_w, grid_w / 2 + 92)  # as wide as its title
    width, height = MARGIN + panel + 28 + panel + MARGIN, top + grid_h + MARGIN
    d = Drawing(
        width,
        height,
        title="Process groups: one per node, one per local_rank",
        description=f"A grid of {nnodes} rows (nodes) and {nproc_per_node} columns "
        "(local ranks), drawn twice. On the left each row is outlined as one process "
        "group, on the right each column.",
    )
    for x, by_node in ((MARGIN, True), (MARGIN + panel + 28, False)):
        with d.shifted(x, 0):
            words = f"one group per {'node' if by_node else 'local_rank'}"
            d.text(left + grid_w / 2, 20, words, bold=True)
            with d.shifted(left, top):
                _grid(d, nnodes, nproc_per_node, side, by_node)
    return d


def _grid(d: Drawing, nnodes: int, columns: int, side: float, by_node: bool) -> None:
    for k in range(nnodes if by_node else columns):
        x, y = (0, k * side) if by_node else (k * side, 0)
        w, h = (columns * side, side) if by_node else (side, nnodes * side)
        d.rect(x + 2, y + 2, w - 4, h - 4, fill=PANEL, stroke_width=2, radius=9)
    d.text(columns * side / 2, -24, "local_rank", size=11, fill=MUTED)
    for local_rank in range(columns):
        x = (local_rank + 0.5) * side
        d.text(x, -8, f"{local_rank}", size=11, fill=MUTED)
    for node_rank in range(nnodes):
        middle = (node_rank + 0.5) * side + 4
        name = f"node_rank {node_rank}"
        d.text(-8, middle, name, size=11, anchor="end", fill=MUTED)
        for local_rank in range(columns):
            rank = node_rank * columns + local_rank
            x, y = local_rank * side + 8, node_rank * side + 8
            d.block(x, y, side - 16, side - 16, f"{rank}", fill=rank_color(rank))


def rendezvous(world_size: int = 4) -> Drawing:
    """Draw ranks that meet at a store, then talk to each other directly. Chapter 01."""
    count("world_size", world_size, 2)
    label, step, store_w = 168, 104, 216
    block_w, block_h, store_h, ranks_y = 84, 36, 44, 146
    wide = max(store_w, world_size * step)
    deep = max(48, 10 + 22 * (world_size - 1))  # room for the curves below the ranks
    d = Drawing(
        2 * MARGIN + label + wide,
        ranks_y + block_h + deep + MARGIN,
        title=f"Rendezvous of {world_size} ranks",
        description="First every rank tells its own address to one store, whose "
        "address is MASTER_ADDR:MASTER_PORT, and reads the addresses of the others. "
        "Then every pair is connected directly: no tensor goes through the store.",
    )
    middle = MARGIN + label + wide / 2
    centers = [middle + (r - (world_size - 1) / 2) * step for r in range(world_size)]
    box = middle - store_w / 2, MARGIN, store_w, store_h
    d.rect(*box, fill=PANEL, stroke=PANEL_EDGE, radius=8)
    d.text(middle, MARGIN + 18, "store", bold=True)
    d.text(middle, MARGIN + 35, "MASTER_ADDR:MASTER_PORT", size=11)
    for x in centers:
        at = middle + (x - middle) * 0.8 * store_w / wide
        d.arrow((x, ranks_y - 5), (at, MARGIN + store_h + 5), both=True)
    for a, b in combinations(range(world_size), 2):
        xa = centers[a] + _port(a, b, world_size, block_w)
        xb = centers[b] + _port(b, a, world_size, block_w)
        y = ranks_y + block_h
        control = (xa + xb) / 2, y + 2 * (4 + 22 * (b - a))
        d.curve((xa, y), control, (xb, y), stroke_width=5, dashed="1.5 2.5")
    for rank, x in enumerate(centers):
        left = x - block_w / 2
        d.block(left, ranks_y, block_w, block_h, f"rank {rank}", fill=rank_color(rank))
    _step(d, 92, "1  meet", "tell your address,", "learn the others'")
    _step(d, ranks_y + block_h + 28, "2  talk", "every pair directly")
    return d


def _port(rank: int, peer: int, world_size: int, width: float) -> float:
    """Return where the curve to `peer` starts, in pixels from the block's middle."""
    left = list(range(rank - 1, -1, -1))  # the nearest peer is outermost
    right = list(range(world_size - 1, rank, -1))
    place = (left + right).index(peer)
    return ((place + 1) / world_size - 0.5) * width


def _step(d: Drawing, y: float, name: str, *lines: str) -> None:
    d.text(MARGIN, y, name, size=15, anchor="start", bold=True)
    for i, line in enumerate(lines):
        d.text(MARGIN, y + 20 + 16 * i, line, size=12, anchor="start", fill=MUTED)


IMAGES = {
    "01_cluster_3x4.svg": partial(cluster, 3, 4, formula=False),
    "01_rendezvous.svg": rendezvous,
    "01_groups.svg": partial(groups, 3, 4),
}
