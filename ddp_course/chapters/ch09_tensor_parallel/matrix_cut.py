"""A matrix product cut among ranks: what each rank has, and what is sent. Chapter 09.

A row for each rank. Grey is what every rank has, a colour is a rank's own part, and
where nothing is stored there is only a dashed outline.
"""

from __future__ import annotations

import math
from fractions import Fraction

from ddp_course.chapters.ch09_tensor_parallel.cut_product import (
    CutProduct,
    Matrix,
    Message,
    Term,
    cut_product,
)
from ddp_course.lab.draw.drawing import ROOM, Drawing
from ddp_course.lab.draw.kinds import room, wrapped
from ddp_course.lab.palette import (
    INK,
    MUTED,
    PANEL_EDGE,
    WHOLE,
    darker,
    rank_color,
    text_color,
)

MARGIN, NAME_W, GAP, HEADER = 16, 66, 18, 56
NEXT = 14  # pixels between two lines
LONGEST = {1: 120, 2: 120, 4: 92, 8: 62}  # pixels of the longest side, by ranks
CELLS = 16  # up to so many rows and columns, every number is a cell
SYMBOL_W, MESSAGE_W = 26, 26
IN_WORDS = {
    "whole": "on all ranks",
    "column": "cut by column",
    "row": "cut by row",
    "sum": "to be added",
}
TITLES = {
    "column": "A product cut by column",
    "row": "A product cut by row",
    "column then row": "An MLP cut by column, then by row",
    "column then column": "An MLP cut by column, twice",
}


def matrix_cut(
    rows: int = 128,
    inner: int = 144,
    columns: int = 576,
    ranks: int = 2,
    how: str = "column",
) -> Drawing:
    """Draw how ranks share X @ W = Y, or the two products of an MLP. Chapter 09.

    For sliders. The arguments are those of `cut_product`: X has `rows` x `inner`
    numbers, W `inner` x `columns`; `how` is "column", "row", "column then row" or
    "column then column". Raises ValueError for what cannot be cut into equal parts.
    """
    cut = cut_product(rows, inner, columns, ranks, how)
    picture = CutPicture(cut)
    told = [w for line in _told(cut) for w in wrapped(line, ROOM - 2 * MARGIN)]
    wide = max(picture.width, *(room(line, 12) for line in told), 420)
    d = Drawing(
        math.ceil(wide + 2 * MARGIN),
        math.ceil(48 + picture.height + 24 * len(told) + 8),
        title=f"{TITLES[how]}: {ranks} rank{'s' * (ranks > 1)}",
        description=in_words(cut),
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    with d.shifted(MARGIN, 48):
        picture.draw(d)
    for i, line in enumerate(told):
        y = 48 + picture.height + 24 * (i + 1)
        d.text(MARGIN, y, line, size=12, anchor="start")
    return d


class CutPicture:
    """The rows of all ranks, with headings: (0, 0) is the top left.

    `longest` are the pixels of the longest side of a matrix. Sides of equal length are
    equal; from `CELLS` numbers on, a side that is four times as long is drawn about
    twice as long, so that small matrices can be seen beside large ones. What is wider
    than a page goes on in the next line; no line ends with a symbol.
    """

    def __init__(self, cut: CutProduct, longest: float | None = None) -> None:
        self.cut = cut
        if longest is None:
            longest = next(px for n, px in LONGEST.items() if cut.ranks <= n)
            longest -= 30 * (len(cut.forward) > 1)  # many terms: the page is narrow
        self.longest = longest
        self.most = max(max(m.rows, m.columns) for m in cut.matrices)
        self.high = max(self.side(m.rows) for m in cut.matrices)  # of a rank's row
        self.lines: list[list[tuple[Term, float]]] = [[]]
        for term in cut.terms:
            line, wide = self.lines[-1], self._width(term)
            if NAME_W + wide + sum(w for _, w in line) > ROOM - 2 * MARGIN:
                last = [line.pop()] if isinstance(line[-1][0], str) else []
                self.lines.append(last)
            self.lines[-1].append((term, wide))
        self.width = NAME_W + max(sum(w for _, w in line) for line in self.lines)
        self.line = HEADER + cut.ranks * (self.high + GAP) - GAP  # its height
        self.height = len(self.lines) * (self.line + NEXT) - NEXT

    def side(self, numbers: int) -> float:
        """Return the pixels of a side of so many numbers."""
        share = numbers / self.most
        if self.most > CELLS:
            share = 0.12 + 0.88 * math.sqrt(share)
        return self.longest * share

    def draw(self, d: Drawing) -> None:
        """Draw line after line."""
        for number, line in enumerate(self.lines):
            with d.shifted(0, number * (self.line + NEXT)):
                self._line(d, line)

    def _line(self, d: Drawing, line: list[tuple[Term, float]]) -> None:
        """Draw the headings and every rank's row."""
        for rank in range(self.cut.ranks):
            y = self._top(rank) + self.high / 2 - 12
            d.block(0, y, 54, 24, f"rank {rank}", fill=rank_color(rank), size=12)
        x = float(NAME_W)
        for term, wide in line:
            middle = x + wide / 2
            for k, text in enumerate(_heading(term, self.cut.ranks)):
                bold, y = k == 0, 12 + 16 * k
                ink, size = (INK, 12) if bold else (MUTED, 11)
                if text:
                    d.text(middle, y, text, size=size, bold=bold, fill=ink)
            if isinstance(term, Message):
                self._message(d, middle)
            for rank in range(self.cut.ranks):
                center = self._top(rank) + self.high / 2
                if isinstance(term, Matrix):
                    self._matrix(d, term, rank, middle, center)
                elif isinstance(term, str):
                    symbol = "@" if term == "@" else "="
                    d.text(middle, center + 5, symbol, size=15)
            x += wide

    def _top(self, rank: int) -> float:
        return HEADER + rank * (self.high + GAP)

    def _width(self, term: Term) -> float:
        """Return the pixels of a term's column, its heading included."""
        body = SYMBOL_W if isinstance(term, str) else MESSAGE_W
        if isinstance(term, Matrix):
            body = self.side(term.columns)
        first, *rest = _heading(term, self.cut.ranks)
        return max(body, room(first, 12, True), *map(room, rest)) + 8

    def _matrix(self, d: Drawing, m: Matrix, rank: int, x: float, y: float) -> None:
        """Draw what `rank` has of a matrix whose middle is (x, y)."""
        wide, high = self.side(m.columns), self.side(m.rows)
        left, top = x - wide / 2, y - high / 2
        d.rect(left, top, wide, high, fill="#FFFFFF", stroke=PANEL_EDGE, dashed=True)
        has_rows, has_columns = m.part(rank, self.cut.ranks)
        a, b = (n / m.rows * high for n in (has_rows.start, has_rows.stop))
        p, q = (n / m.columns * wide for n in (has_columns.start, has_columns.stop))
        fill = WHOLE if m.cut == "whole" else rank_color(rank)
        d.rect(left + p, top + a, q - p, b - a, fill=fill, stroke=darker(fill))
        if self.most <= CELLS:
            cell, color = self.longest / self.most, darker(fill, 0.25)
            for row in range(has_rows.start + 1, has_rows.stop):
                at = top + row * cell
                d.line((left + p, at), (left + q, at), stroke=color)
            for column in range(has_columns.start + 1, has_columns.stop):
                at = left + column * cell
                d.line((at, top + a), (at, top + b), stroke=color)
        elif m.cut != "whole" and min(q - p, b - a) >= 10:
            d.text(left + (p + q) / 2, top + (a + b) / 2 + 4, f"{rank}", size=12,
                   bold=True, fill=text_color(fill))  # fmt: skip
        if m.cut == "sum" and rank:
            d.text(x, self._top(rank) - GAP / 2 + 5, "+", size=15, bold=True)

    def _message(self, d: Drawing, middle: float) -> None:
        """Draw a collective: hatched, through the rows of all ranks."""
        x, high = middle - MESSAGE_W / 2, self.line - HEADER
        d.rect(x, HEADER, MESSAGE_W, high, fill="#FFFFFF", stroke=MUTED)
        d.hatch(x, HEADER, MESSAGE_W, high, stroke=MUTED)


def _heading(term: Term, ranks: int) -> tuple[str, ...]:
    """Return the lines above a term."""
    if isinstance(term, Matrix):
        size = f"{term.rows} × {term.columns}"
        return term.name, size, IN_WORDS[term.cut]
    if isinstance(term, Message):
        return term.op, f"of {term.name}", f"{_bytes(term.sent(ranks))} bytes"
    return ("", term if term == "GELU" else "")


def _bytes(sent: Fraction) -> str:
    whole = sent.denominator == 1
    return f"{int(sent):,}" if whole else f"{float(sent):,.1f}"


def _told(cut: CutProduct) -> list[str]:
    """Return what the picture costs, in sentences."""
    numbers = sum(w.rows * w.columns for w in cut.weights)
    names = " and ".join(w.name for w in cut.weights)
    share = f"1/{cut.ranks} of" if cut.ranks > 1 else "all of"
    own = (
        f"Each rank stores {share} {names}: {numbers // cut.ranks:,} of {numbers:,} "
        f"numbers, and does {share} the multiplications."
    )
    ways = (("Forward", cut.forward), ("Backward", cut.backward))
    return [own, *(f"{way}: {_sends(ms, cut.ranks)}." for way, ms in ways)]


def _sends(messages: list[Message] | tuple[Message, ...], ranks: int) -> str:
    if not messages:
        return "nothing is sent"
    each = [
        f"{m.op} of {m.name}, {_bytes(m.sent(ranks))} bytes from each rank"
        for m in messages
    ]
    return "; ".join(each)


def in_words(cut: CutProduct) -> str:
    """Say what the picture shows."""
    has = "; ".join(
        f"{m.name} of {m.rows} × {m.columns} numbers, {IN_WORDS[m.cut]}"
        for m in cut.matrices
    )
    return f"From left to right: {has}. {' '.join(_told(cut))}"
