"""A matrix product shared by ranks, as data: who has what, and what is sent. Ch. 09."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ddp_course import theory
from ddp_course.lab.draw.steps import count
from ddp_course.theory.checks import check_choice

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


Term = Matrix | Message | str


@dataclass(frozen=True)
class CutProduct:
    """One product or two, the second of the first's result, shared by `ranks` ranks.

    `terms` are read from the left: matrices, "@", "=", "GELU" (which is "=" after a
    GELU of every number) and messages. `backward` is what has to be sent for the
    gradient of X.
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
        """The matrices that are multiplied with: what a layer stores."""
        pairs = zip(self.terms, self.terms[1:], strict=False)
        return [after for term, after in pairs if term == "@"]


TERMS = {  # how -> what is read from the left: matrices and their cuts, and messages
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
# The gradients that are summed in backward: each rank's columns give a part of them.
SUMMED = {"column": "X", "row": "", "column then row": "X", "column then column": "ZX"}
SHAPES = {  # of one product; of two, Y has the shape of X
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
