"""What buckets gain: a step with one all-reduce, a step with overlap. Chapter 05."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import MUTED, darker, lighter, rank_color

MARGIN = 16
FORWARD, LAYER, SEND, UPDATE = 2.0, 1.0, 0.8, 0.7  # of the picture, in its own time
LAYERS, UNIT, NAME_W, LANE = 4, 78, 86, 30


@dataclass(frozen=True)
class Block:
    """A block of the picture: in lane "compute" or "network", from start to end."""

    lane: str
    name: str
    start: float
    end: float
    kind: str = "compute"


def schedule(bucketed: bool) -> list[Block]:
    """Return a step's blocks: a layer's gradients are sent at once, or all at the end.

    Sending takes the same time in all, in one message or in four.
    """
    blocks = [Block("compute", "forward", 0, FORWARD)]
    free = FORWARD + LAYERS * LAYER  # when the network may send next
    for k in range(LAYERS):
        start = FORWARD + k * LAYER
        name = f"layer {LAYERS - 1 - k}"
        blocks.append(Block("compute", name, start, start + LAYER, "backward"))
    if bucketed:
        free = 0.0
        for k in range(LAYERS):
            start = max(free, FORWARD + (k + 1) * LAYER)
            free = start + SEND
            blocks.append(Block("network", f"bucket {k}", start, free, "send"))
    else:
        end = free + LAYERS * SEND
        blocks.append(Block("network", "all gradients", free, end, "send"))
        free = end
    return [*blocks, Block("compute", "update", free, free + UPDATE)]


def overlapped() -> Drawing:
    """Draw a step with one all-reduce after backward, and one with buckets. Ch. 05."""
    steps = {"flat": schedule(False), "bucketed": schedule(True)}
    ends = {name: blocks[-1].end for name, blocks in steps.items()}
    right = round(MARGIN + NAME_W + UNIT * ends["flat"])
    d = Drawing(
        right + MARGIN,
        366,
        title="Communication after backward, and hidden behind it",
        description=(
            "Two steps of rank 0 on the same scale. Flat: forward, backward from "
            "layer 3 to layer 0, then all gradients are sent, then the update. "
            "Bucketed: bucket 0 is sent while backward of layer 2 runs, bucket 1 "
            "during layer 1, bucket 2 during layer 0; only bucket 3, with the "
            "gradients of layer 0, is sent after backward. The step ends earlier by "
            "the communication of three buckets."
        ),
    )
    heads = {
        "flat": "one all-reduce, after backward",
        "bucketed": "bucket k travels while earlier layers are still in backward",
    }
    for i, (name, blocks) in enumerate(steps.items()):
        y = 14 + i * 140
        d.text(MARGIN, y + 14, f"{name}: {heads[name]}", bold=True, anchor="start")
        with d.shifted(MARGIN, y + 26):
            _draw_step(d, blocks)
    x0, x1 = (right - UNIT * (ends["flat"] - ends[k]) for k in ("bucketed", "flat"))
    d.line((x0, 180 + LANE), (x0, 296), dashed=True)
    d.line((x1, 40 + LANE), (x1, 296), dashed=True)
    d.arrow((x0 + 2, 284), (x1 - 2, 284), both=True, stroke_width=2)
    d.text((x0 + x1) / 2, 274, "saved: buckets 0 to 2", bold=True)
    d.text(MARGIN, 312, "time", size=12, anchor="start")
    d.arrow((MARGIN + NAME_W, 308), (right, 308))
    d.block(MARGIN, 330, 56, 20, "rank 0", fill=rank_color(0), size=12)
    words = (
        "The other ranks do the same at the same time. Solid: forward and update; "
        "lighter: backward; hatched: sent."
    )
    d.text(MARGIN + 66, 344, words, size=12, anchor="start", fill=MUTED)
    return d


def _draw_step(d: Drawing, blocks: Sequence[Block]) -> None:
    """Draw the two lanes of a step; (0, 0) is left of the names."""
    color = rank_color(0)
    tops = {"compute": 0, "network": LANE + 12}
    for lane, y in tops.items():
        d.text(0, y + LANE / 2 + 4, lane, size=12, anchor="start")
    for block in blocks:
        x, wide = NAME_W + UNIT * block.start, UNIT * (block.end - block.start)
        y = tops[block.lane]
        if block.kind == "send":
            d.rect(x, y, wide, LANE, fill="#FFFFFF", stroke=darker(color))
            d.hatch(x, y, wide, LANE, stroke=color)
            d.text(x + wide / 2, y + LANE + 15, block.name, size=11)
        else:
            fill = lighter(color) if block.kind == "backward" else color
            d.block(x, y, wide, LANE, block.name, fill=fill, size=11, radius=0)


IMAGES = {"05_overlap.svg": overlapped}
