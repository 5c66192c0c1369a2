"""A matrix product shared by ranks: as data, and drawn. Chapter 09.

Drawn, it has a row for each rank. Grey is what every rank has, a colour is a rank's own
part, and where nothing is stored there is only a dashed outline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ddp_course import theory
from ddp_course.lab.draw.drawing import ROOM, Drawing
from ddp_course.lab.draw.kinds import room, wrapped
from ddp_course.lab.draw.steps import count
from ddp_course.lab.palette import (
    INK,
    MUTED,
    PANEL_EDGE,
    WHOLE,
    darker,
    rank_color,
    text_color,
)
from ddp_course.theory.checks import check_choice

FLOAT = 4  # bytes of a number in float32
MOST_RANKS = 8
ALGORITHMS = {"all-reduce": "all_reduce_ring", "all-gather": "all_gather"}


@dataclass(frozen=True)
class Matrix:
    """A matrix of float32 numbers, and its division among the ranks.

    `cut` is "whole": all ranks have all of it; "column" or "row": rank r has the r-th
    part of the columns or rows; "sum": every rank has a summand of the full size.
    """

    name: str
    rows: int
    columns: int
    cut: str

    @property
    def nbytes(self) -> int:
        """Bytes of the full matrix."""
        return FLOAT * self.rows * self.columns

    def part(self, rank: int, ranks: int) -> tuple[slice, slice]:
        """Return the rows and the columns that `rank` has, as slices."""
        everything = slice(0, self.rows), slice(0, self.columns)
        if self.cut == "row":
            each = self.rows // ranks
            return slice(rank * each, (rank + 1) * each), everything[1]
        if self.cut == "column":
            each = self.columns // ranks
            return everything[0], slice(rank * each, (rank + 1) * each)
        return everything


@dataclass(frozen=True)
class Message:
    """A collective that all ranks call: "all-reduce" or "all-gather" of a matrix."""

    op: str
    name: str
    nbytes: int  # bytes of the full matrix

    def sent(self, ranks: int) -> Fraction:
        """Return the bytes that each rank sends, by the algorithm that sends fewest."""
        return theory.bytes_sent(ALGORITHMS[self.op], ranks)[0] * self.nbytes


Term = Matrix | Message | str


@dataclass(frozen=True)
class CutProduct:
    """A product, or two in a row, shared by `ranks` ranks.

    `terms` are read from the left: matrices, "@", "=", "GELU" (which is "=" after a
    GELU of every number) and messages. `backward` are the messages of the gradients.
    """

    how: str
    ranks: int
    terms: tuple[Term, ...]
    backward: tuple[Message, ...]

    @property
    def matrices(self) -> list[Matrix]:
        """The matrices among the terms."""
        return [term for term in self.terms if isinstance(term, Matrix)]

    @property
    def forward(self) -> list[Message]:
        """The messages among the terms."""
        return [term for term in self.terms if isinstance(term, Message)]

    @property
    def weights(self) -> list[Matrix]:
        """The weight matrices: those to the right of an "@"."""
        pairs = zip(self.terms, self.terms[1:], strict=False)
        return [after for term, after in pairs if term == "@"]


TERMS = {  # how -> terms from left to right: matrices with their cuts, and messages
    "column": "X whole, @, W column, =, Y column",
    "row": "X column, @, W row, =, Y sum, all-reduce, Y whole",
    "column then row": (
        "X whole, @, A column, GELU, Z column, @, B row, =, Y sum, all-reduce, Y whole"
    ),
    "column then column": (
        "X whole, @, A column, GELU, Z column, all-gather, Z whole, @, B column, =, "
        "Y column, all-gather, Y whole"
    ),
}
# Matrices with gradients that are summed in backward: each rank has one summand.
SUMMED = {"column": "X", "row": "", "column then row": "X", "column then column": "ZX"}
SHAPES = {  # one product; with two, Y has the shape of X
    "X": ("rows", "inner"),
    "W": ("inner", "columns"),
    "A": ("inner", "columns"),
    "Z": ("rows", "columns"),
    "B": ("columns", "inner"),
    "Y": ("rows", "columns"),
}
HOW = tuple(TERMS)


def cut_product(
    rows: int = 128,
    inner: int = 144,
    columns: int = 576,
    ranks: int = 2,
    how: str = "column",
) -> CutProduct:
    """Return how `ranks` ranks share X @ W = Y, or the two products of an MLP.

    X has `rows` rows (tokens) of `inner` numbers, W has `columns` columns. `how` is a
    name of `HOW`: "column" and "row" say how W is cut; in "column then row" and
    "column then column" GELU(X @ A) @ B = Y, where A is cut by column, and B leads back
    to `inner` columns. Raises ValueError for another name, numbers below 1, and a
    dimension that cannot be cut into equal parts. Source: Shoeybi et al. 2019
    (Megatron-LM), section 3. Chapter 09.
    """
    numbers = {"rows": rows, "inner": inner, "columns": columns}
    for name, value in numbers.items():
        count(name, value, 1)
    count("ranks", ranks, 1, MOST_RANKS)
    check_choice("how", how, HOW)
    shapes = SHAPES | ({"Y": SHAPES["X"]} if "then" in how else {})
    terms: list[Term] = []
    for word in TERMS[how].split(", "):
        name, _, cut = word.partition(" ")
        if not cut:
            last = terms[-1]
            sent = isinstance(last, Matrix) and word in ALGORITHMS
            terms.append(Message(word, last.name, last.nbytes) if sent else word)
            continue
        dims = dict(zip(("row", "column"), shapes[name], strict=True))
        dim = dims.get(cut, "")
        if numbers.get(dim, 0) % ranks:
            raise ValueError(
                f"{dim} is {numbers[dim]}; {ranks} ranks need a multiple of {ranks} to "
                f"share it {how!r}"
            )
        terms.append(Matrix(name, *(numbers[dim] for dim in shapes[name]), cut))
    sizes = {term.name: term.nbytes for term in terms if isinstance(term, Matrix)}
    backward = [
        Message("all-reduce", f"{name}'s gradient", sizes[name]) for name in SUMMED[how]
    ]
    return CutProduct(how, ranks, tuple(terms), tuple(backward))


# ---- drawn ---------------------------------------------------------------------------

MARGIN, NAME_W, GAP, HEADER = 16, 66, 18, 56
NEXT = 14  # pixels from one line of text to the next
LONGEST = {1: 120, 2: 120, 4: 92, 8: 62}  # pixels of the longest side, by ranks
CELLS = 16  # up to this many rows and columns, every number is drawn as a cell
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
    "column then column". Raises ValueError as `cut_product` does.
    """
    cut = cut_product(rows, inner, columns, ranks, how)
    picture = CutPicture(cut)
    texts = [w for line in _sentences(cut) for w in wrapped(line, ROOM - 2 * MARGIN)]
    wide = max(picture.width, *(room(line, 12) for line in texts), 420)
    d = Drawing(
        math.ceil(wide + 2 * MARGIN),
        math.ceil(48 + picture.height + 24 * len(texts) + 8),
        title=f"{TITLES[how]}: {ranks} rank{'s' * (ranks > 1)}",
        description=in_words(cut),
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    with d.shifted(MARGIN, 48):
        picture.draw(d)
    for i, line in enumerate(texts):
        y = 48 + picture.height + 24 * (i + 1)
        d.text(MARGIN, y, line, size=12, anchor="start")
    return d


class CutPicture:
    """A picture of a product with a row for each rank; (0, 0) is the top left.

    `longest` is the length in pixels of a matrix's longest side. Sides with the same
    number of elements are drawn equally long. If a side has more than `CELLS` elements,
    a side with four times as many is drawn only about twice as long, so that small
    matrices can be seen beside large ones. A picture wider than a page continues in the
    next line; no line ends with a symbol.
    """

    def __init__(self, cut: CutProduct, longest: float | None = None) -> None:
        self.cut = cut
        if longest is None:
            longest = next(px for n, px in LONGEST.items() if cut.ranks <= n)
            longest -= 30 * (len(cut.forward) > 1)  # many terms: the page is narrow
        self.longest = longest
        self.most = max(max(m.rows, m.columns) for m in cut.matrices)
        self.high = max(
            self.side(m.rows) for m in cut.matrices
        )  # height of a rank's row
        self.lines: list[list[tuple[Term, float]]] = [[]]
        for term in cut.terms:
            line, wide = self.lines[-1], self._width(term)
            if NAME_W + wide + sum(w for _, w in line) > ROOM - 2 * MARGIN:
                last = [line.pop()] if isinstance(line[-1][0], str) else []
                self.lines.append(last)
            self.lines[-1].append((term, wide))
        self.width = NAME_W + max(sum(w for _, w in line) for line in self.lines)
        self.line = HEADER + cut.ranks * (self.high + GAP) - GAP  # height of a line
        self.height = len(self.lines) * (self.line + NEXT) - NEXT

    def side(self, numbers: int) -> float:
        """Return the length in pixels of a matrix side with this many numbers."""
        share = numbers / self.most
        if self.most > CELLS:
            share = 0.12 + 0.88 * math.sqrt(share)
        return self.longest * share

    def draw(self, d: Drawing) -> None:
        """Draw the picture's lines below each other."""
        for number, line in enumerate(self.lines):
            with d.shifted(0, number * (self.line + NEXT)):
                self._line(d, line)

    def _line(self, d: Drawing, line: list[tuple[Term, float]]) -> None:
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
        """Draw the part of a matrix that `rank` has, centred at (x, y)."""
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
    if isinstance(term, Matrix):
        size = f"{term.rows} × {term.columns}"
        return term.name, size, IN_WORDS[term.cut]
    if isinstance(term, Message):
        return term.op, f"of {term.name}", f"{_bytes(term.sent(ranks))} bytes"
    return ("", term if term == "GELU" else "")


def _bytes(sent: Fraction) -> str:
    whole = sent.denominator == 1
    return f"{int(sent):,}" if whole else f"{float(sent):,.1f}"


def _sentences(cut: CutProduct) -> list[str]:
    """Return sentences about the bytes that the ranks store and send."""
    numbers = sum(w.rows * w.columns for w in cut.weights)
    names = " and ".join(w.name for w in cut.weights)
    share = f"1/{cut.ranks} of" if cut.ranks > 1 else "all of"
    own = (
        f"Each rank stores {share} {names}: {numbers // cut.ranks:,} of {numbers:,} "
        f"numbers, and does {share} the multiplications."
    )
    ways = (("Forward", cut.forward), ("Backward", cut.backward))
    return [own, *(f"{way}: {_sends(ms, cut.ranks)}." for way, ms in ways)]


def _sends(messages: Sequence[Message], ranks: int) -> str:
    if not messages:
        return "nothing is sent"
    each = [
        f"{m.op} of {m.name}, {_bytes(m.sent(ranks))} bytes from each rank"
        for m in messages
    ]
    return "; ".join(each)


def in_words(cut: CutProduct) -> str:
    """Describe the matrices and messages of a product in sentences."""
    has = "; ".join(
        f"{m.name} of {m.rows} × {m.columns} numbers, {IN_WORDS[m.cut]}"
        for m in cut.matrices
    )
    return f"From left to right: {has}. {' '.join(_sentences(cut))}"
