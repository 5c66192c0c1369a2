"""Pictures of a plan: every rank's buffer, the origin of its numbers, and messages.

A chunk that holds one rank's numbers is a block in that rank's colour. A chunk that
holds a sum of several ranks' numbers is a stack of such blocks: blocks next to each
other are different places in the buffer, blocks above each other are a sum.

Each rank has a row, rank 0 on top. In a `Grid`, a column is a chunk. An `Exchange` is
for an all_to_all. `layout` chooses one of the two for a plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ddp_course.collectives.plan import Contributions, Plan, State, Transfer, simulate
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.palette import MUTED, PANEL_EDGE, rank_color

MOST_RANKS, MOST_CHUNKS = 8, 64
LAYER, INSET = 13, 2  # height of a block in a stack, and the margin around the stack
HALO = 4  # width of the hatched frame around a message's chunks
HEADER = 26  # height of the chunks' numbers above the cells
GAP, ROW_GAP = 10, 24
LANE, HEAD = 8, 9  # distance of parallel arrows, length of an arrow's head
WIDEST = 800  # pixels; more chunks than fit are drawn in several lines
ARROW = 1.2
LABEL_W = 36  # width of a chunk with a label such as "0→1"


@dataclass(frozen=True)
class Look:
    """The size of a plan's chunks in a drawing, and the number of blocks in each.

    Attributes:
        width, height: the size of a chunk in pixels.
        across, down: how many blocks a stack has next to and above each other.
    """

    width: float
    height: float
    across: int
    down: int

    @property
    def adds(self) -> bool:
        """Whether a chunk may hold a sum of several ranks' numbers."""
        return self.across * self.down > 1


def look_of(plan: Plan, buffer_width: float, least_height: float = 24) -> Look:
    """Return the size of chunks with which a buffer is about `buffer_width` wide.

    Raises ValueError for a plan that has more ranks or chunks than can be drawn.
    """
    if plan.world_size > MOST_RANKS or plan.chunks > MOST_CHUNKS:
        raise ValueError(
            f"{plan.name} has {plan.world_size} ranks and {plan.chunks} chunks; it can "
            f"be drawn for up to {MOST_RANKS} ranks and {MOST_CHUNKS} chunks"
        )
    pairs = [has for state in simulate(plan) for chunks in state for has in chunks]
    often = max((n for has in pairs for n in Counter(has).values()), default=1)
    many = any(len(has) > 1 for has in pairs)
    across = (1 if plan.world_size <= 4 else 2) if many else 1
    down = math.ceil(plan.world_size / across) if many else 1
    slot = 16 if across == 1 else 15
    if often > 1:
        slot = 34  # room for "0×2"
    width = max(across * slot + 2 * INSET, buffer_width / whole_buffer(plan))
    height = max(least_height, down * LAYER + 2 * INSET if many else 0)
    return Look(width, height, across, down)


def whole_buffer(plan: Plan) -> int:
    """Return the number of chunks in one rank's buffer: the unit S of sent bytes.

    It is the number that a rank has at the start or at the end, whichever is more. In
    an all_to_all of n ranks, each rank has n of the n * n chunks.
    """
    return max(1, *map(len, plan.start), *map(len, plan.end))


def complete(plan: Plan, chunk: int) -> Contributions:
    """Return the ranks that contribute to a complete chunk, sorted."""
    return tuple(rank for rank, has in enumerate(plan.start) if chunk in has)


def draw_cell(
    d: Drawing,
    x: float,
    y: float,
    look: Look,
    has: Contributions,
    *,
    whole: bool = False,
    label: str = "",
) -> None:
    """Draw a chunk that holds the numbers of the ranks `has`, framed if `whole`.

    A chunk with one rank's numbers may show a `label` in place of the rank's number.
    """
    w, h = look.width, look.height
    d.rect(x, y, w, h, fill="#FFFFFF", stroke=PANEL_EDGE)
    if not look.adds:
        for rank in has[:1]:
            color = rank_color(rank)
            d.block(x, y, w, h, label or f"{rank}", fill=color, size=12, radius=0)
        return
    slot_w, slot_h = (w - 2 * INSET) / look.across, (h - 2 * INSET) / look.down
    for rank, often in Counter(has).items():
        across, down = divmod(rank, look.down)
        at = x + INSET + across * slot_w, y + INSET + down * slot_h
        words = f"{rank}" if often == 1 else f"{rank}×{often}"
        fill = rank_color(rank)
        d.block(*at, slot_w, slot_h, words, fill=fill, size=11, radius=0)
    if whole:
        d.rect(x, y, w, h, stroke_width=2.5)


def draw_halo(d: Drawing, x: float, y: float, width: float, height: float) -> None:
    """Hatch a frame around a message's chunks; draw it before the chunks."""
    x, y, width, height = x - HALO, y - HALO, width + 2 * HALO, height + 2 * HALO
    d.hatch(x, y, width, height)
    d.rect(x, y, width, height)


class Buffers:
    """The buffers of all ranks, at the same places in the picture of every step.

    `states` is the result of `simulate(plan)`; `width` and `height` are in pixels.
    """

    def __init__(self, plan: Plan, look: Look, width: float, high: float) -> None:
        self.plan, self.look, self.states = plan, look, simulate(plan)
        self.row_height = high
        self.width = width
        rows = plan.world_size * (high + ROW_GAP) - ROW_GAP
        self.height = HEADER + rows + HALO

    def top(self, rank: int) -> float:
        """Return the y at which the row of `rank` begins."""
        return HEADER + rank * (self.row_height + ROW_GAP)


@dataclass(frozen=True)
class Piece:
    """The chunks of one arrow: columns `first` to `last` in a line of a rank's row."""

    src: int
    dst: int
    line: int
    first: int
    last: int

    @property
    def down(self) -> int:
        """1 if the arrow points down, -1 if up."""
        return 1 if self.src < self.dst else -1

    @property
    def gutter(self) -> tuple[int, int]:
        """The gutter in which the arrow passes other rows, and its direction, `down`.

        Gutter g is to the left of column g. Arrows that point down pass on the right of
        their chunks, arrows that point up on the left.
        """
        return (self.last + 1 if self.down == 1 else self.first), self.down

    def meets(self, other: Piece) -> bool:
        """Return whether the two arrows pass the same rows in the same gutter."""
        ranks = [sorted((p.src, p.dst)) for p in (self, other)]
        (a, b), (c, d) = ranks
        return self.gutter == other.gutter and max(a, c) <= min(b, d)


class Grid(Buffers):
    """The buffers of all ranks with a column for each chunk that is ever filled."""

    def __init__(self, plan: Plan, buffer_width: float) -> None:
        states, look = simulate(plan), look_of(plan, buffer_width)
        self.chunks = [
            chunk
            for chunk in range(plan.chunks)
            if any(rank[chunk] for state in states for rank in state)
        ] or list(range(plan.chunks))
        fit = max(1, int(WIDEST // (look.width + 2 * GAP)))
        self.lines = -(-len(self.chunks) // fit)
        self.columns = -(-len(self.chunks) // self.lines)
        self.pieces = [
            [p for t in plan.transfers if t.step == step for p in self._pieces(t)]
            for step in range(plan.steps)
        ]
        self.lanes = [_lanes(filter(self._bends, pieces)) for pieces in self.pieces]
        self.x, width = self._across(look.width)
        high = self.lines * (look.height + GAP) - GAP
        super().__init__(plan, look, width, high)

    def draw(self, d: Drawing, state: State, step: int) -> None:
        """Draw `state` and the transfers of its `step`; step 0 has none."""
        if len(self.chunks) > 1:
            for x, chunk in zip(self.x, self.chunks, strict=False):
                middle = x + self.look.width / 2
                d.text(middle, HEADER - 11, f"{chunk}", size=11, fill=MUTED)
        for piece in self.pieces[step - 1] if step else ():
            for rank in (piece.src, piece.dst):
                self._halo(d, piece, rank)
        for rank, holds in enumerate(state):
            for i, chunk in enumerate(self.chunks):
                line, column = divmod(i, self.columns)
                y = self.top(rank) + line * (self.look.height + GAP)
                x, has = self.x[column], holds[chunk]
                whole = has == complete(self.plan, chunk)
                draw_cell(d, x, y, self.look, has, whole=whole)
        for piece in self.pieces[step - 1] if step else ():
            if self._bends(piece):
                self._bent_arrow(d, piece, self.lanes[step - 1][piece])
            else:
                self._straight_arrow(d, piece, self.pieces[step - 1])

    def _pieces(self, t: Transfer) -> Iterator[Piece]:
        """Yield the pieces of a transfer, one for each line."""
        cells = [
            divmod(i, self.columns)
            for i, chunk in enumerate(self.chunks)
            if t.first <= chunk < t.last
        ]
        for line in sorted({line for line, _ in cells}):
            columns = [column for at, column in cells if at == line]
            yield Piece(t.src, t.dst, line, columns[0], columns[-1])

    def _bends(self, piece: Piece) -> bool:
        return abs(piece.src - piece.dst) > 1 or self.lines > 1

    def _across(self, cell: float) -> tuple[list[float], float]:
        """Return the x of each column, and the width of the whole grid."""
        places, x = [], 0.0
        for column in range(self.columns):
            x += self._room(column)
            places.append(x)
            x += cell
        return places, x + self._room(self.columns)

    def _room(self, column: int) -> float:
        """Return the width that the arrows to the left of `column` need."""
        last: dict[int, int] = {}  # {direction: the outermost lane of its arrows}
        for piece, lane in (pair for step in self.lanes for pair in step.items()):
            if piece.gutter == (column, piece.down):
                last[piece.down] = max(lane, last.get(piece.down, 0))
        if not last:
            return GAP if 0 < column < self.columns else 0
        return 2 * HALO + 4 + sum(HEAD + lane * LANE for lane in last.values())

    def _span(self, piece: Piece, rank: int) -> tuple[float, float, float]:
        """Return x, y and width of the piece's cells in the row of `rank`."""
        left = self.x[piece.first]
        y = self.top(rank) + piece.line * (self.look.height + GAP)
        return left, y, self.x[piece.last] + self.look.width - left

    def _halo(self, d: Drawing, piece: Piece, rank: int) -> None:
        """Hatch a frame around the piece's cells in the row of `rank`."""
        x, y, width = self._span(piece, rank)
        high = self.look.height
        draw_halo(d, x, y, width, high)
        for column in range(piece.first, piece.last):
            left = self.x[column] + self.look.width
            gap = self.x[column + 1] - left
            d.rect(left, y, gap, high, fill="#FFFFFF", stroke="none")

    def _straight_arrow(self, d: Drawing, piece: Piece, others: list[Piece]) -> None:
        """Draw an arrow to the next row; two opposite ones are drawn side by side."""
        x, y, width = self._span(piece, piece.src)
        back = any(
            (p.src, p.dst) == (piece.dst, piece.src)
            and max(p.first, piece.first) <= min(p.last, piece.last)
            for p in others
        )
        x += width / 2 + 7 * piece.down * back
        y += self.look.height + HALO if piece.down == 1 else -HALO
        end = y + piece.down * (ROW_GAP - 2 * HALO)
        d.arrow((x, y), (x, end), stroke_width=ARROW)

    def _bent_arrow(self, d: Drawing, piece: Piece, lane: int) -> None:
        """Draw an arrow past other rows, beside the column."""
        x, y, width = self._span(piece, piece.src)
        edge = x + width + HALO if piece.down == 1 else x - HALO
        beside = edge + piece.down * (HEAD + lane * LANE)
        high, lower = self.look.height, 0.2 * piece.down
        leave = y + (0.5 + lower) * high
        arrive = self._span(piece, piece.dst)[1] + (0.5 - lower) * high
        path = (edge, leave), (beside, leave), (beside, arrive)
        d.line(*path, stroke_width=ARROW)
        d.arrow((beside, arrive), (edge, arrive), stroke_width=ARROW)


def _lanes(pieces: Iterator[Piece]) -> dict[Piece, int]:
    """Return a lane for each piece: no arrows overlap, and short ones are inside."""
    lanes: dict[Piece, int] = {}
    for p in sorted(pieces, key=lambda p: (abs(p.src - p.dst), p.src, p.line)):
        taken = {lane for q, lane in lanes.items() if p.meets(q)}
        lanes[p] = min(set(range(len(taken) + 1)) - taken)
    return lanes


class Exchange(Buffers):
    """The chunks with which each rank starts, on the left, and ends, on the right.

    For plans in which no rank ever has all chunks: each row shows only the rank's own.
    """

    BETWEEN = 92  # pixels for the arrows

    def __init__(self, plan: Plan, buffer_width: float) -> None:
        ranks, states = range(plan.world_size), simulate(plan)
        ever = [
            {c for state in states for c, has in enumerate(state[r]) if has}
            for r in ranks
        ]
        self.before = [sorted(plan.start[r]) for r in ranks]
        self.after = [sorted(plan.end[r] | (ever[r] - plan.start[r])) for r in ranks]
        left, right = (max(map(len, side)) for side in (self.before, self.after))
        look = look_of(plan, max(buffer_width, LABEL_W * left))
        self.pitch = look.width + GAP
        self.right = left * self.pitch - GAP + self.BETWEEN
        width = self.right + right * self.pitch - GAP
        super().__init__(plan, look, width, look.height)
        self.labels = labels(plan)

    def draw(self, d: Drawing, state: State, step: int) -> None:
        """Draw `state` and the transfers of its `step`; step 0 has none."""
        self._heading(d, 0, "starts with")
        self._heading(d, self.right, "gets")
        moved = [t for t in self.plan.transfers if t.step == step - 1]
        for rank in range(self.plan.world_size):
            sent = {c for t in moved if t.src == rank for c in range(t.first, t.last)}
            got = {c for t in moved if t.dst == rank for c in range(t.first, t.last)}
            own, others = self.before[rank], self.after[rank]
            cells = [(i * self.pitch, c, c in sent) for i, c in enumerate(own)]
            cells += [(self.right + i * self.pitch, c, c in got)
                      for i, c in enumerate(others)]  # fmt: skip
            for x, chunk, travels in cells:
                if travels:
                    draw_halo(d, x, self.top(rank), self.look.width, self.look.height)
                has, label = state[rank][chunk], self.labels[chunk]
                draw_cell(d, x, self.top(rank), self.look, has, label=label)
        middle = self.look.height / 2
        for t in moved:
            start = self.right - self.BETWEEN + 12, self.top(t.src) + middle
            end = self.right - 12, self.top(t.dst) + middle
            d.arrow(start, end, stroke_width=ARROW)

    def _heading(self, d: Drawing, x: float, words: str) -> None:
        d.text(x, self.top(0) - 11, words, size=11, anchor="start", fill=MUTED)


def layout(plan: Plan, buffer_width: float = 160) -> Buffers:
    """Return the layout that suits a plan.

    It is a grid if some rank has all chunks at the start or at the end. Raises
    ValueError for a plan with more ranks or chunks than can be drawn.
    """
    return (Grid if shares_columns(plan) else Exchange)(plan, buffer_width)


def shares_columns(plan: Plan) -> bool:
    """Return whether some rank has all chunks, at the start or at the end."""
    everything = frozenset().union(*plan.start, *plan.end)
    return any(has == everything for has in (*plan.start, *plan.end))


def labels(plan: Plan) -> list[str]:
    """Return a label for each chunk: "0→1" if rank 0 has it first, and rank 1 last.

    A label is "" for a chunk of several ranks, and in plans whose columns are shared.
    """
    names = []
    for chunk in range(plan.chunks):
        first = [r for r, has in enumerate(plan.start) if chunk in has]
        last = [r for r, has in enumerate(plan.end) if chunk in has]
        alone = len(first) == len(last) == 1 and not shares_columns(plan)
        names.append(f"{first[0]}→{last[0]}" if alone else "")
    return names
