"""Lanes of ranks that compute and wait: how every pipeline is drawn. Chapters 10, 11.

A lane has its rank's colour. Forward is solid and backward lighter, as in all figures;
the weights' gradients, where they are computed apart, are the lightest and dotted.
Waiting is a dashed outline. A rank's second stage hangs a little lower than its first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.kinds import dots, room
from ddp_course.lab.draw.work import OPS, Work, chunks_of, gaps, ranks_of, window
from ddp_course.lab.palette import (
    MUTED,
    PANEL,
    PANEL_EDGE,
    darker,
    lighter,
    rank_color,
    text_color,
)

NAME_W, BLOCK, LOWER, LANE_GAP = 66, 22, 6, 6
PALER = {"F": 0.0, "B": 0.5, "I": 0.7, "W": 0.86}  # how much white is mixed in
SAMPLE = "#8F97A2"  # of a legend: a grey, since colours are for ranks


class Lanes:
    """A lane for each rank; (0, 0) is left of the first one's name.

    `scale` is in pixels for a unit of the works' time, of which `start` is at the left
    end of the lanes. `notes` are written to the right of a lane, by rank.
    """

    def __init__(
        self,
        works: Sequence[Work],
        scale: float,
        start: float | None = None,
        notes: Mapping[int, str] | None = None,
    ) -> None:
        self.works, self.scale, self.notes = works, scale, notes or {}
        self.start = window(works)[0] if start is None else start
        self.ranks = ranks_of(works)
        self.chunks = chunks_of(works)
        self.high = BLOCK + LOWER * max(self.chunks.values(), default=0)
        self.width = NAME_W + (window(works)[1] - self.start) * scale
        self.height = len(self.ranks) * (self.high + LANE_GAP) - LANE_GAP

    def draw(self, d: Drawing, right: float | None = None) -> None:
        """Draw every lane; notes begin at `right`, by default behind the last block."""
        right = self.width + 10 if right is None else right
        letters = self._letters_fit()
        for row, rank in enumerate(self.ranks):
            y = row * (self.high + LANE_GAP)
            name = y + (self.high - BLOCK) / 2
            color = rank_color(rank)
            d.block(0, name, 54, BLOCK, f"rank {rank}", fill=color, size=12)
            for begin, end in gaps(self.works, rank):
                self._idle(d, begin, end, y)
            for work in (work for work in self.works if work.rank == rank):
                self._block(d, work, y, letters)
            if rank in self.notes:
                d.text(right, name + 15, self.notes[rank], size=12, anchor="start")

    def x(self, time: float) -> float:
        """Return where a time is."""
        return NAME_W + (time - self.start) * self.scale

    def _letters_fit(self) -> bool:
        """Return whether there is room for letters on all blocks of microbatches."""
        return all(
            _room(work.names[0]) + 2 < (work.end - work.start) * self.scale
            for work in self.works
            if work.microbatch is not None
        )

    def _idle(self, d: Drawing, begin: float, end: float, y: float) -> None:
        x, wide = self.x(begin), (end - begin) * self.scale
        if wide >= 2:
            d.rect(x, y, wide, self.high, fill=PANEL, stroke=PANEL_EDGE, dashed=True)
        if wide >= room("waits") + 8:
            d.text(x + wide / 2, y + self.high / 2 + 4, "waits", size=11, fill=MUTED)

    def _block(self, d: Drawing, work: Work, y: float, letters: bool) -> None:
        x, wide = self.x(work.start), (work.end - work.start) * self.scale
        top = y + LOWER * self.chunks.get((work.rank, work.stage), 0)
        fill = draw_work(d, x, top, wide, work.op, rank_color(work.rank))
        names = work.names if letters or work.microbatch is None else work.names[1:]
        for name in names:
            if _room(name) <= wide:
                _write(d, x + wide / 2, top + BLOCK / 2 + 4, name, work.op, fill)
                return


def draw_work(d: Drawing, x: float, y: float, wide: float, op: str, color: str) -> str:
    """Draw the block of an op without a name, and return its fill."""
    fill = lighter(color, PALER.get(op, 0.0)) if PALER.get(op) else color
    d.rect(x, y, wide, BLOCK, fill=fill, stroke=darker(color))
    if op == "W" and wide > 6:
        dots(d, x, y, wide, BLOCK, darker(color, 0.2))
    return fill


def _write(d: Drawing, x: float, base: float, name: str, op: str, fill: str) -> None:
    """Write a block's name; on dots, it gets a clear ground."""
    if op == "W":
        half = _room(name) / 2
        d.rect(x - half, base - 10, 2 * half, 12, fill=fill, stroke="none")
    d.text(x, base, name, size=11, bold=True, fill=text_color(fill))


def _room(name: str) -> float:
    """Return the pixels of a block's name, in which a W is wider than most."""
    return room(name, 11, True) + 4 * name.count("W")


def draw_legend(d: Drawing, x: float, y: float, works: Sequence[Work]) -> float:
    """Draw what the blocks of `works` mean, in a line whose middle is `y`.

    Returns where it ends.
    """
    seen = {work.op for work in works}
    for op in (op for op in OPS if op in seen):
        draw_work(d, x, y - BLOCK / 2, 26, op, SAMPLE)
        word = OPS[op] if op != "B" or "I" not in seen else "whole backward"
        x = _say(d, x + 32, y, f"{op}: {word}")
    d.rect(x, y - BLOCK / 2, 26, BLOCK, fill=PANEL, stroke=PANEL_EDGE, dashed=True)
    x = _say(d, x + 32, y, "waits")
    if len(set(chunks_of(works).values())) > 1:
        x = _say(d, x, y, "lower: the rank's next stage")
    return x


def _say(d: Drawing, x: float, y: float, words: str) -> float:
    d.text(x, y + 4, words, size=11, anchor="start")
    return x + room(words) + 14
