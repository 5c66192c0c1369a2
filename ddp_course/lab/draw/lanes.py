"""Lanes of blocks over a time axis: the drawing behind every timeline.

Computing has its rank's colour: forward is solid, backward lighter, and the weights'
gradients, if computed separately, are lightest and dotted. Communication is hatched,
and waiting is a dashed outline. The alternative text lists the same blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from ddp_course.lab.draw.drawing import Box, Drawing
from ddp_course.lab.draw.kinds import dots, room, wrapped
from ddp_course.lab.palette import (
    MUTED,
    PANEL,
    PANEL_EDGE,
    darker,
    lighter,
    rank_color,
    text_color,
)

MARGIN, PLOT_W = 16, 600
NAME_W, BLOCK, LOWER, LANE_GAP, RUN_GAP = 66, 22, 6, 6, 18
ROW = 18  # pixels of a line of words
PALER = {"F": 0.0, "B": 0.5, "I": 0.7, "W": 0.86}  # the share of white mixed in
SAMPLE = "#8F97A2"  # the legend's grey, since colours stand for ranks
MOST_WORDS = 40  # in the alternative text of a lane


@dataclass(frozen=True)
class Block:
    """A block of a timeline: one piece of work from `start` to `end`.

    Attributes:
        start, end: in the unit of the axis.
        look: one of `PALER`, "sent" or "waits".
        names: from long to short; the first that fits is written into the block.
        alt: its name in the alternative text; by default the longest of `names`.
        lower: how many steps of LOWER pixels the block is shifted down in its lane.
    """

    start: float
    end: float
    look: str = "F"
    names: tuple[str, ...] = ()
    alt: str = ""
    lower: int = 0


@dataclass(frozen=True)
class Lane:
    """A rank's blocks, in order. A `boxed` name has the rank's colour."""

    name: str
    rank: int
    blocks: Sequence[Block]
    note: str = ""  # written below the lane
    boxed: bool = True


@dataclass(frozen=True)
class Run:
    """Lanes drawn below each other, with a title; `says` is written after the title."""

    lanes: Sequence[Lane]
    title: str = ""
    says: str = ""

    @property
    def lane_height(self) -> int:
        """Pixels of each lane."""
        return BLOCK + LOWER * max(b.lower for lane in self.lanes for b in lane.blocks)

    @property
    def pitch(self) -> int:
        """Pixels from one lane to the next."""
        notes = any(lane.note for lane in self.lanes)
        return self.lane_height + LANE_GAP + ROW * notes

    @property
    def height(self) -> int:
        """Pixels of all lanes."""
        return len(self.lanes) * self.pitch - LANE_GAP


def draw_runs(
    title: str,
    runs: Sequence[Run],
    label: str,
    long: float,
    *,
    legend: Mapping[str, str] | None = None,
    name_w: float = NAME_W,
    says: str = "",
    head: tuple[float, Callable[[Drawing], None]] | None = None,
    foot: str = "",
) -> Drawing:
    """Draw runs below each other on one axis, from 0 to `long`.

    `label` names the axis and the unit of the blocks' times. `legend` maps looks to
    words; only looks that occur are shown. `says` is written below the title, `foot`
    at the bottom. `head` is (height, function): the function draws above the runs.
    """
    lanes = [lane for run in runs for lane in run.lanes]
    left, scale = MARGIN + name_w, PLOT_W / long
    wide = left + PLOT_W - MARGIN
    above, below = (wrapped(text, wide) for text in (says, foot))
    heads = [wrapped(run.title + f" ({run.says})" * bool(run.says), wide, 13)
             for run in runs]  # fmt: skip
    samples = _samples(lanes, legend or {}, wide)
    top = 44 + ROW * len(above) + 6 * bool(says) + (head[0] if head else 0)
    high = sum(run.height + RUN_GAP for run in runs) + 20 * sum(map(len, heads))
    d = Drawing(
        left + PLOT_W + 2 * MARGIN,
        math.ceil(top + high + 52 + 28 * len(samples) + ROW * len(below)),
        title=title,
        description=" ".join(filter(None, [says, *map(in_words, runs)])),
    )
    d.text(MARGIN, 26, title, size=15, bold=True, anchor="start")
    for i, line in enumerate(above):
        d.text(MARGIN, 48 + i * ROW, line, size=12, anchor="start")
    if head:
        with d.shifted(MARGIN, 56):
            head[1](d)
    y = float(top)
    for run, lines in zip(runs, heads, strict=True):
        for line in lines:
            d.text(MARGIN, y + 10, line, size=12, bold=True, anchor="start")
            y += 20
        for lane in run.lanes:
            with d.shifted(MARGIN, y):
                _draw_lane(d, lane, run.lane_height, name_w, scale)
            y += run.pitch
        y += RUN_GAP - LANE_GAP
    draw_axis(d, left, y - 6, PLOT_W, long, label)
    y += 56
    for row in samples:
        x = float(MARGIN)
        for look, words in row:
            if look:
                draw_block(d, (x, y - BLOCK / 2, 26, BLOCK), look, SAMPLE)
            x += 32 * bool(look)
            d.text(x, y + 4, words, size=11, anchor="start")
            x += 8 + room(words)
        y += 28
    for i, line in enumerate(below):
        d.text(MARGIN, y + i * ROW, line, size=12, anchor="start", fill=MUTED)
    return d


def in_words(run: Run) -> str:
    """Return the alternative text of a run: its lanes' blocks in order, and notes."""
    texts = []
    for lane in run.lanes:
        names = [block.alt or (*block.names, block.look)[0] for block in lane.blocks]
        words = []
        for name, same in groupby(names):
            times = len(list(same))
            words.append(name if times == 1 else f"{times} times {name}")
        more = len(words) - MOST_WORDS
        words[MOST_WORDS:] = [f"and {more} more"] if more > 0 else []
        note = f" ({lane.note})" if lane.note else ""
        texts.append(f"{lane.name}: {' '.join(words)}{note}")
    head = ": ".join(filter(None, [run.title, run.says]))
    return f"{head}. {'; '.join(texts)}." if head else f"{'; '.join(texts)}."


def _draw_lane(
    d: Drawing, lane: Lane, high: float, name_w: float, scale: float
) -> None:
    """Draw a lane with its top left corner at (0, 0), its name first."""
    name = (high - BLOCK) / 2
    if lane.boxed:
        color = rank_color(lane.rank)
        d.block(0, name, 54, BLOCK, lane.name, fill=color, size=12)
    else:
        d.text(0, name + 15, lane.name, size=12, anchor="start")
    blocks = _visible(lane.blocks, scale)
    next_lefts = [*(left for left, _, _ in blocks), math.inf][1:]
    for (left, right, block), next_left in zip(blocks, next_lefts, strict=True):
        tall = high if block.look == "waits" else BLOCK
        at = name_w + left, LOWER * block.lower, right - left, tall
        # The next block would cover a part of the name.
        names = block.names if right <= next_left + 1 else ()
        draw_block(d, at, block.look, rank_color(lane.rank), names)
    if lane.note:
        d.text(name_w, high + 13, lane.note, size=12, anchor="start", fill=MUTED)


def _visible(blocks: Iterable[Block], scale: float) -> list[tuple[float, float, Block]]:
    """Return (left, right, block) in pixels for each block within the plot.

    Every block is at least a pixel wide; short blocks of the same look in one pixel are
    merged.
    """
    found: list[tuple[float, float, Block]] = []
    for block in blocks:
        left, right = block.start * scale, block.end * scale
        if right < 0 or left > PLOT_W:
            continue
        left, right = max(left, 0.0), min(right, PLOT_W)
        if right - left < 1:
            left = min(math.floor(left), PLOT_W - 1)
            right = left + 1
            if found and found[-1][0] == left and found[-1][2].look == block.look:
                continue
        found.append((left, right, block))
    return found


def draw_block(
    d: Drawing, box: Box, look: str, color: str, names: Iterable[str] = ()
) -> None:
    """Draw a block, and the first of `names` that fits into it."""
    x, y, wide, tall = box
    spare, fill, ink = 0, "#FFFFFF", ""
    if look == "waits":
        spare, fill, ink = 8, PANEL, MUTED
        d.rect(*box, fill=fill, stroke=PANEL_EDGE, dashed=True)
    elif look == "sent":
        spare = 8  # pixels of hatching that the name must not cover
        d.rect(*box, fill=fill, stroke=darker(color, 0.3))
        if wide >= 3:
            d.hatch(*box, stroke=darker(color, 0.3))
    else:
        fill = lighter(color, PALER[look]) if PALER[look] else color
        d.rect(*box, fill=fill, stroke=darker(color))
        if look == "W" and wide > 6:
            dots(d, box, darker(color, 0.2))
    for name in names:
        half = room_for(name) / 2
        if 2 * half + spare <= wide:
            middle, base = x + wide / 2, y + tall / 2 + 4
            if look in ("W", "sent"):  # clear the pattern behind the name
                d.rect(middle - half, base - 10, 2 * half, 12, fill=fill, stroke="none")
            ink, bold = ink or text_color(fill), look != "waits"
            d.text(middle, base, name, size=11, bold=bold, fill=ink)
            return


def room_for(name: str) -> float:
    """Return the width of a block's name in pixels; a W is wider than most letters."""
    return room(name, 11, True) + 4 * name.count("W")


def _samples(
    lanes: Sequence[Lane], legend: Mapping[str, str], wide: float
) -> list[list[tuple[str, str]]]:
    """Return (look, words) for each look that occurs, in rows of at most `wide`."""
    blocks = [block for lane in lanes for block in lane.blocks]
    seen = {block.look for block in blocks}
    samples = [(look, words) for look, words in legend.items() if look in seen]
    if legend and any(block.lower for block in blocks):
        samples.append(("", "lower: the rank's next stage"))
    rows, x = [], wide
    for look, words in samples:
        if x + 32 + room(words) > wide:
            rows, x = [*rows, []], 0.0
        rows[-1].append((look, words))
        x += 40 + room(words)
    return rows


def draw_axis(
    d: Drawing, x: float, y: float, wide: float, long: float, label: str
) -> None:
    """Draw a time axis from 0 to `long`, with about ten round numbers."""
    power = 10 ** math.floor(math.log10(long / 10))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= long / 10)
    d.line((x, y), (x + wide, y))
    for k in range(math.floor(long / step + 1e-9) + 1):
        at = x + k * step * wide / long
        d.line((at, y), (at, y + 5))
        d.text(at, y + 18, f"{k * step:.6g}", size=11)
    d.text(x + wide / 2, y + 36, label, size=12)
