"""The GPT's gradients in their buckets, and when buckets are sent. Chapter 05."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.kinds import counted
from ddp_course.lab.draw.lanes import Block, Lane, Run, draw_runs
from ddp_course.lab.palette import MUTED, WHOLE
from ddp_course.mechanisms.buckets import MIB, Bucket, bucket_plan
from ddp_course.model import GPT, PRESETS
from ddp_course.theory.checks import check_choice

MARGIN, LABEL_W, STRIP_W, LEAST = 16, 66, 540, 2.5  # LEAST: a tiny parameter's width
TOP, ROW, CELL_H = 62, 50, 24
FILLS = ("#FFFFFF", WHOLE)  # alternate between buckets; colours are for ranks


def buckets(
    preset: str = "1m", bucket_cap_mb: float = 1, first_bucket_mb: float = 1
) -> Drawing:
    """Draw which parameter of the GPT `preset` is in which bucket, and what is sent.

    Each layer has a line; the layer that backward reaches first is on top. Widths are
    proportional to bytes, except for tiny parameters. Below are the buckets in the
    order in which they are sent. Caps are in MiB. Raises ValueError for an unknown
    preset and a cap of 0 or less. Chapter 05.
    """
    check_choice("the preset", preset, PRESETS)
    with torch.device("meta"):  # only shapes
        parameters = dict(GPT(PRESETS[preset]).named_parameters())
    plan = bucket_plan(parameters.items(), bucket_cap_mb, first_bucket_mb)
    cells = cells_of(plan)
    lines = [list(line) for _, line in groupby(cells, key=lambda cell: cell.layer)]
    widest = max(sum(cell.nbytes for cell in line) for line in lines)
    scale = (STRIP_W - LEAST * max(map(len, lines))) / widest  # pixels per byte
    below = TOP + len(lines) * ROW + 16
    first = f", first_bucket_mb = {first_bucket_mb:g}" * (first_bucket_mb != 1)
    caps = f"bucket_cap_mb = {bucket_cap_mb:g}{first}"
    head = f"GPT {preset}, {caps}: {counted(len(plan), 'bucket')}"
    d = Drawing(
        LABEL_W + STRIP_W + 2 * MARGIN,
        below + 88,
        title=head,
        description=" ".join(f"{bucket}." for bucket in plan),
    )
    d.text(MARGIN, 26, head, size=15, bold=True, anchor="start")
    words = "Backward goes down, and in a line nearly from left to right. "
    words += "Hairlines: biases and norms."
    d.text(MARGIN, 46, words, size=12, anchor="start", fill=MUTED)
    for i, line in enumerate(lines):
        with d.shifted(MARGIN, TOP + i * ROW):
            _draw_line(d, line, scale)
    with d.shifted(MARGIN, below):
        _draw_sent(d, plan)
    return d


@dataclass(frozen=True)
class Cell:
    """A parameter in the figure: its layer, its short name, its bucket, its bytes."""

    layer: str
    name: str
    bucket: int
    nbytes: int


def cells_of(plan: Sequence[Bucket]) -> list[Cell]:
    """Return a cell for each parameter of a plan, in the order of the plan."""
    cells = []
    for bucket in plan:
        ends = [*bucket.offsets[1:], bucket.numel]
        places = zip(bucket.parameters, bucket.offsets, ends, strict=True)
        for name, start, end in places:
            words = name.split(".")
            layer = ".".join(words[: 1 + words[1].isdigit()])
            short = words[-2] if words[-1] == "weight" else ""
            nbytes = (end - start) * bucket.dtype.itemsize
            cells.append(Cell(layer, short, bucket.index, nbytes))
    return cells


def _draw_line(d: Drawing, line: Sequence[Cell], scale: float) -> None:
    """Draw the parameters of a layer, and above them the buckets that they are in."""
    d.text(0, 18 + CELL_H / 2 + 4, line[0].layer, size=12, anchor="start")
    x, unnamed = LABEL_W, []
    for index, run in groupby(line, key=lambda cell: cell.bucket):
        left = x
        for cell in run:
            wide = max(LEAST, cell.nbytes * scale)
            d.rect(x, 18, wide, CELL_H, fill=FILLS[index % 2])
            if cell.name and wide > 7.2 * len(cell.name) + 4:
                d.text(x + wide / 2, 18 + CELL_H / 2 + 4, cell.name, size=11)
            elif cell.name and wide > 3 * LEAST:
                unnamed.append(cell.name)
            x += wide
        d.line((left + 1, 14), (x - 1, 14), stroke_width=2)
        labels = (f"bucket {index}", f"{index}")
        for label in [w for w in labels if x - left > 7.6 * len(w)][:1]:
            d.text((left + x) / 2, 10, label, size=11, bold=True)
    if words := ", ".join(unnamed):
        d.text(x + 8, 18 + CELL_H / 2 + 4, words, size=11, anchor="start", fill=MUTED)


def _draw_sent(d: Drawing, plan: Sequence[Bucket]) -> None:
    """Draw the buckets as they are sent, one all-reduce after the other."""
    total = sum(bucket.nbytes for bucket in plan)
    words = f"sent in this order, in {counted(len(plan), 'all-reduce')}:"
    d.text(0, 4, words, size=12, anchor="start", bold=True)
    d.text(0, 30, "bucket", size=12, anchor="start")
    fits = all(STRIP_W * bucket.nbytes / total > 30 for bucket in plan)
    x = LABEL_W
    for bucket in plan:
        wide = STRIP_W * bucket.nbytes / total
        d.rect(x, 14, wide, CELL_H, fill="#FFFFFF")
        d.hatch(x, 14, wide, CELL_H)
        number, size = f"{bucket.index}", f"{bucket.nbytes / MIB:.2f}"
        half = 2 + 3.7 * len(number)
        if wide > 2 * half + 1:
            box = x + wide / 2 - half, 18, 2 * half, 16
            d.block(*box, number, fill="#FFFFFF", size=11, radius=0)
        if fits:
            d.text(x + wide / 2, 52, size, size=11)
        x += wide
    if fits:
        d.text(0, 52, "MiB", size=12, anchor="start")
    words = f"{total / MIB:.2f} MiB in all; the widths are in proportion to bytes."
    d.text(0, 72 if fits else 56, words, size=11, anchor="start", fill=MUTED)


# ---- what buckets gain -------------------------------------------------------------

LAYERS, FORWARD, SEND, UPDATE = 4, 2.0, 0.9, 0.8  # a layer's backward takes 1
LOOKS = {"F": "forward, update", "B": "backward", "sent": "sent", "waits": "waits"}


def schedule(messages: int) -> Run:
    """Return a step with 1, 2 or 4 messages, which take the same time in total."""
    computes, sends = [Block(0, FORWARD, names=("forward",))], []
    each, free = LAYERS // messages, 0.0  # free: when the network may send next
    for k in range(LAYERS):
        ready = FORWARD + k + 1
        computes.append(Block(ready - 1, ready, "B", (f"layer {LAYERS - 1 - k}",)))
        if (k + 1) % each == 0:
            number = str(k // each)
            names = (f"bucket {number}", number) if messages > 1 else ("all gradients",)
            start, free = max(free, ready), max(free, ready) + SEND * each
            sends.append(Block(start, free, "sent", names))
    computes.append(Block(ready, free, "waits", ("waits",)))
    computes.append(Block(free, free + UPDATE, names=("update",)))
    both = ("compute", computes), ("network", sends)
    lanes = [Lane(name, 0, blocks, boxed=False) for name, blocks in both]
    if messages == 1:
        return Run(lanes, "flat", "one all-reduce, after backward")
    says = "bucket k travels while earlier layers are still in backward"
    return Run(lanes, "bucketed", says)


def overlapped() -> Drawing:
    """Draw a step with one all-reduce after backward, and one with buckets. Ch. 05."""
    runs = [schedule(1), schedule(LAYERS)]
    title, end = "One step of a rank, without and with overlap", runs[0].lanes[0].blocks
    label = "time, in units of a layer's backward"
    more = {"legend": LOOKS, "foot": "All ranks do the same at the same time."}
    return draw_runs(title, runs, label, end[-1].end, **more)


IMAGES = {"05_overlap.svg": overlapped}
