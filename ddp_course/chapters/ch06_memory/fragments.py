"""Fragments: a row of memory from which tensors come and go. Chapter 06."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import (
    INK,
    MUTED,
    PANEL,
    PANEL_EDGE,
    WHOLE,
)

MARGIN, NAME_W, UNIT, ROW, HIGH, TOP, WORDS_W = 16, 84, 26, 40, 28, 66, 236
Request = tuple[str, int]


@dataclass(frozen=True)
class Room:
    """A row of memory after one request.

    Attributes:
        request: what was asked for, such as "allocate e: 6" or "free b".
        blocks: name -> (first unit, number of units), for what lies in it.
        holes: (first unit, number of units) of what is free, from the left.
        failed: there was no hole that was large enough.
    """

    request: str
    blocks: dict[str, tuple[int, int]]
    holes: tuple[tuple[int, int], ...]
    failed: bool = False

    @property
    def free(self) -> int:
        """The units that are free, all together."""
        return sum(size for _, size in self.holes)

    @property
    def largest(self) -> int:
        """The units of the largest hole."""
        return max((size for _, size in self.holes), default=0)


def first_fit(requests: Sequence[Request], capacity: int) -> list[Room]:
    """Serve each request with the first hole in which it fits, and tell what is left.

    A request is (name, units); with 0 units, the block of that name is freed. What does
    not fit is refused, and nothing changes. Blocks cannot be moved: somebody has their
    addresses. Raises ValueError for a name that is taken, or that nothing has.
    """
    blocks: dict[str, tuple[int, int]] = {}
    rooms = []
    for name, units in requests:
        if units < 0 or (units > 0) == (name in blocks):
            raise ValueError(f"{(name, units)!r} does not go with {sorted(blocks)}")
        failed = False
        if units == 0:
            del blocks[name]
        else:
            hole = next((h for h in _holes(blocks, capacity) if h[1] >= units), None)
            failed = hole is None
            if hole is not None:
                blocks[name] = (hole[0], units)
        request = f"allocate {name}: {units}" if units else f"free {name}"
        holes = tuple(_holes(blocks, capacity))
        rooms.append(Room(request, dict(blocks), holes, failed))
    return rooms


def _holes(blocks: dict[str, tuple[int, int]], capacity: int) -> list[tuple[int, int]]:
    """Return (first unit, units) of what lies between the blocks."""
    holes, at = [], 0
    for start, units in [*sorted(blocks.values()), (capacity, 0)]:
        if start > at:
            holes.append((at, start - at))
        at = start + units
    return holes


def fragments(requests: Sequence[Request], capacity: int = 16) -> Drawing:
    """Draw a row of memory after each request, and how much of it is free."""
    rooms = first_fit(requests, capacity)
    left = MARGIN + NAME_W + 40
    d = Drawing(
        left + capacity * UNIT + 12 + WORDS_W,
        TOP + len(rooms) * ROW + 12,
        title=f"A memory of {capacity} units, and {len(rooms)} requests",
        description=" ".join(_in_words(room) for room in rooms),
    )
    d.text(MARGIN, 24, d.title, size=15, bold=True, anchor="start")
    words = "White is free. A block stays where it is until it is freed."
    d.text(MARGIN, 44, words, size=11, anchor="start", fill=MUTED)
    for k, room in enumerate(rooms):
        y = TOP + k * ROW
        base = y + HIGH / 2 + 4
        d.text(MARGIN, base, room.request, size=12, anchor="start", bold=room.failed)
        d.rect(left, y, capacity * UNIT, HIGH, fill="#FFFFFF", stroke=PANEL_EDGE)
        for unit in range(1, capacity):
            x = left + unit * UNIT
            d.line((x, y), (x, y + HIGH), stroke=PANEL)
        for name, (start, units) in room.blocks.items():
            d.block(left + start * UNIT, y, units * UNIT, HIGH, name, fill=WHOLE)
        says, bold = _said(room)
        at = left + capacity * UNIT + 12
        d.text(at, base, says, size=12, anchor="start", bold=bold, fill=INK)
    return d


def _said(room: Room) -> tuple[str, bool]:
    """Return what stands beside a row, and whether it is important."""
    free = f"free {room.free}, largest hole {room.largest}"
    return (f"refused: {free}", True) if room.failed else (free, False)


def _in_words(room: Room) -> str:
    at = [f"{n} at {s} to {s + u - 1}" for n, (s, u) in sorted(room.blocks.items())]
    return f"{room.request}: {_said(room)[0]}; {', '.join(at) or 'nothing'}."
