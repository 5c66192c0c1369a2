"""A matrix product shared by ranks, as data: who has what, and what is sent. Ch. 09."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ddp_course import theory
from ddp_course.lab.draw.steps import count

FLOAT = 4  # bytes of a number in float32
MOST_RANKS = 8
ALGORITHMS = {"all-reduce": "all_reduce_ring", "all-gather": "all_gather"}


@dataclass(frozen=True)
class Matrix:
    """A matrix of float32 numbers, and how the ranks have it.

    `cut` is "whole": all ranks have all of it; "column" or "row": rank r has the r-th
    part of the columns or rows; "sum": every rank has a matrix of the full size, and
    these have to be added.
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
        """Return which rows and which columns `rank` has."""
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
    nbytes: int  # of the full matrix

    def sent(self, ranks: int) -> Fraction:
        """Return the bytes that each rank sends, by the algorithm that sends fewest."""
        return theory.bytes_sent(ALGORITHMS[self.op], ranks)[0] * self.nbytes


@dataclass(frozen=True)
class CutProduct:
    """One product or two, the second of the first's result, shared by `ranks` ranks.

    `terms` are read from the left: matrices, "@", "=", "GELU" (which is "=" after a
    GELU of every number) and messages. `backward` is what has to be sent for the
    gradient of X.
    """

    how: str
    ranks: int
    terms: tuple[Matrix | Message | str, ...]
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
        """The matrices that are multiplied with: what a layer stores."""
        pairs = zip(self.terms, self.terms[1:], strict=False)
        return [after for term, after in pairs if term == "@"]


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
    for name, value in (("rows", rows), ("inner", inner), ("columns", columns)):
        count(name, value, 1)
    count("ranks", ranks, 1, MOST_RANKS)
    if how not in HOW:
        raise ValueError(f"how is {how!r}; it can be {', '.join(map(repr, HOW))}")
    make, cuts = HOW[how]
    for name, value in (("inner", inner), ("columns", columns)):
        if name in cuts and value % ranks:
            raise ValueError(
                f"{name} is {value}; {ranks} ranks need a multiple of {ranks} to share "
                f"it {how!r}"
            )
    terms, gradients = make(rows, inner, columns)
    return CutProduct(how, ranks, terms, gradients)


Made = tuple[tuple[Matrix | Message | str, ...], tuple[Message, ...]]


def _column(rows: int, inner: int, columns: int) -> Made:
    x = Matrix("X", rows, inner, "whole")
    w = Matrix("W", inner, columns, "column")
    y = Matrix("Y", rows, columns, "column")
    return (x, "@", w, "=", y), (_sum_of_gradients(x),)


def _row(rows: int, inner: int, columns: int) -> Made:
    x = Matrix("X", rows, inner, "column")
    w = Matrix("W", inner, columns, "row")
    y = Matrix("Y", rows, columns, "sum")
    return (x, "@", w, "=", y, *_everywhere(y)), ()


def _column_then_row(rows: int, inner: int, columns: int) -> Made:
    x = Matrix("X", rows, inner, "whole")
    a = Matrix("A", inner, columns, "column")
    z = Matrix("Z", rows, columns, "column")
    b = Matrix("B", columns, inner, "row")
    y = Matrix("Y", rows, inner, "sum")
    terms = x, "@", a, "GELU", z, "@", b, "=", y, *_everywhere(y)
    return terms, (_sum_of_gradients(x),)


def _column_then_column(rows: int, inner: int, columns: int) -> Made:
    x = Matrix("X", rows, inner, "whole")
    a = Matrix("A", inner, columns, "column")
    z = Matrix("Z", rows, columns, "column")
    b = Matrix("B", columns, inner, "column")
    y = Matrix("Y", rows, inner, "column")
    terms = x, "@", a, "GELU", z, *_everywhere(z), "@", b, "=", y, *_everywhere(y)
    return terms, (_sum_of_gradients(z), _sum_of_gradients(x))


def _everywhere(matrix: Matrix) -> tuple[Message, Matrix]:
    """Return the message after which all ranks have all of `matrix`, and that."""
    op = "all-reduce" if matrix.cut == "sum" else "all-gather"
    whole = Matrix(matrix.name, matrix.rows, matrix.columns, "whole")
    return Message(op, matrix.name, matrix.nbytes), whole


def _sum_of_gradients(x: Matrix) -> Message:
    """Return what backward sends: each rank's columns give a part of the gradient."""
    return Message("all-reduce", f"{x.name}'s gradient", x.nbytes)


HOW = {  # how -> the function that makes it, and which dimensions are cut
    "column": (_column, ("columns",)),
    "row": (_row, ("inner",)),
    "column then row": (_column_then_row, ("columns",)),
    "column then column": (_column_then_column, ("inner", "columns")),
}
