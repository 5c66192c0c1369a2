"""The figures of chapter 09 show what they are about, and nothing else."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from drawings import check_sliders, fills, laid_out, rects, words
from refusals import refused
from torch.nn.functional import gelu

from ddp_course.chapters.ch09_tensor_parallel.figures import cut_products
from ddp_course.chapters.ch09_tensor_parallel.matrix_cut import (
    HOW,
    CutPicture,
    Matrix,
    Message,
    cut_product,
    matrix_cut,
)
from ddp_course.lab import rank_color
from ddp_course.lab.draw.drawing import ROOM, Drawing
from ddp_course.lab.palette import WHOLE

SHAPES = [
    (128, 144, 576, 2), (128, 144, 576, 4), (8, 8, 8, 8), (1, 3, 300, 3),
    (4, 6, 8, 2), (4096, 24, 96, 8), (3, 5, 7, 1),
]  # fmt: skip
CUTS = [(*shape, how) for shape in SHAPES for how in HOW]
CUTS = [c for c in CUTS if c[1] % c[3] == 0 and c[2] % c[3] == 0]
test_the_layout = laid_out(cut_products, (matrix_cut, CUTS))


def carried_out(cut, x, weights):
    """What every rank ends up with if it does what `cut` says; x: each rank's own."""
    weights, have, product = iter(weights), None, False
    for term in cut.terms:
        if isinstance(term, str):
            product = term == "@"
            have = [gelu(part) for part in have] if term == "GELU" else have
        elif isinstance(term, Message):
            whole = sum(have) if term.op == "all-reduce" else torch.cat(have, 1)
            have = [whole] * cut.ranks
        elif have is None:
            have = [own[term.part(rank, cut.ranks)] for rank, own in enumerate(x)]
        elif product:
            w = next(weights)
            parts = [w[term.part(rank, cut.ranks)] for rank in range(cut.ranks)]
            have = [h @ part for h, part in zip(have, parts, strict=True)]
    return have


def fault_of(cut):
    """What is wrong with a plan, "" if nothing: seen from its numbers."""
    drawn = torch.Generator().manual_seed(0)
    size = {"generator": drawn, "dtype": torch.float64}
    first, last = cut.matrices[0], cut.matrices[-1]
    x = torch.randn(first.rows, first.columns, **size).requires_grad_()
    weights = [torch.randn(m.rows, m.columns, **size) for m in cut.weights]
    full = x @ weights[0] if len(weights) == 1 else gelu(x @ weights[0]) @ weights[1]
    own = [x.detach().clone().requires_grad_() for _ in range(cut.ranks)]
    try:
        have = carried_out(cut, own, weights)
    except RuntimeError as error:
        return str(error)
    weight = torch.randn(full.shape, **size)  # of every number of Y in the loss
    for rank, part in enumerate(have):
        mine = last.part(rank, cut.ranks)
        if part.shape != full[mine].shape or not torch.allclose(part, full[mine]):
            return f"rank {rank} does not have its part of the product"
    parts = [(h * weight[last.part(r, cut.ranks)]).sum() for r, h in enumerate(have)]
    loss = parts[0] if last.cut == "whole" else sum(parts)
    wanted = torch.autograd.grad((full * weight).sum(), x)[0]
    got = torch.autograd.grad(loss, own)
    summed = any(m.name == "X's gradient" for m in cut.backward)
    for rank, gradient in enumerate(got):
        mine = first.part(rank, cut.ranks)
        gradient = sum(got) if summed else gradient
        if not torch.allclose(gradient[mine], wanted[mine]):
            return f"rank {rank} does not have its gradient of X"
    return ""


@pytest.mark.parametrize("how", HOW)
def test_a_cut_computes_the_product_and_its_gradient(how):
    for shape in ((8, 24, 48), (3, 12, 12), (1, 12, 24)):
        for ranks in (1, 2, 3, 4, 6):
            assert fault_of(cut_product(*shape, ranks, how)) == ""


def with_term(cut, at, change):
    terms = list(cut.terms)
    terms[at] = change(terms[at]) if change else None
    return replace(cut, terms=tuple(term for term in terms if term is not None))


WRONG = {
    "W by row, X whole": ("row", 0, lambda m: replace(m, cut="whole"), "shapes"),
    "parts not added": ("row", 5, None, "rank 0 does not have its part"),
    "gathered, not added": (
        "row", 5, lambda m: replace(m, op="all-gather"), "rank 0 does not have"
    ),
    "added, not gathered": (
        "column then column", 5, lambda m: replace(m, op="all-reduce"), "shapes"
    ),
    "B by column": (
        "column then row", 6, lambda m: replace(m, cut="column"), "shapes"
    ),
    "Y said to be whole": (
        "column", 4, lambda m: replace(m, cut="whole"), "rank 0 does not have its part"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cut_is_seen(name):
    how, at, change, says = WRONG[name]
    cut = cut_product(8, 4, 12, 2, how)
    assert fault_of(cut) == ""
    assert says in fault_of(with_term(cut, at, change))


@pytest.mark.parametrize("how", ["column", "column then row", "column then column"])
def test_a_backward_that_sends_nothing_is_seen(how):
    cut = cut_product(8, 4, 12, 2, how)
    assert "its gradient of X" in fault_of(replace(cut, backward=()))
    assert cut_product(8, 4, 12, 2, "row").backward == ()


def test_the_bytes_are_those_of_the_formulas():
    s = 4 * 128 * 144  # of Y, X and their gradients
    for n in (1, 2, 3, 4):
        once = Fraction(n - 1, n)
        sent = {
            how: [m.sent(n) for c in [cut_product(ranks=n, how=how)]
                  for m in (*c.forward, *c.backward)]
            for how in HOW
        }  # fmt: skip
        assert sent["column"] == [2 * once * s]
        assert sent["row"] == [2 * once * 4 * s]
        assert sent["column then row"] == [2 * once * s] * 2
        gathered = [once * 4 * s, once * s, 2 * once * 4 * s, 2 * once * s]
        assert sent["column then column"] == gathered
    said = " ".join(words(matrix_cut(ranks=4, how="column then row")))
    assert "all-reduce of Y, 110,592 bytes from each rank" in said
    assert "all-reduce of X's gradient, 110,592 bytes from each rank" in said
    assert "1/4 of A and B: 41,472 of 165,888 numbers" in said
    assert "Backward: nothing is sent" in " ".join(words(matrix_cut(how="row")))


def areas(drawing, color):
    """The areas of rectangles of a colour, without the blocks with a rank's name."""
    return [
        wide * high
        for _, _, wide, high, e in rects(drawing)
        if e.get("fill") == color and not e.get("rx")
    ]


def drawn_faults(draw, cut):
    """What a picture of `cut` shows too much or too little, rank by rank."""
    d = Drawing(1200, 1200, title="t")
    picture = CutPicture(cut)
    draw(picture, d)
    sides = [(picture.side(m.rows), picture.side(m.columns), m) for m in cut.matrices]
    for rank in range(cut.ranks):
        has = [a * b / (cut.ranks if m.cut != "sum" else 1)
               for a, b, m in sides if m.cut != "whole"]  # fmt: skip
        if areas(d, rank_color(rank)) != pytest.approx(has, rel=0.01):
            yield f"rank {rank} has other parts"
    whole = [a * b for a, b, m in sides if m.cut == "whole" for _ in range(cut.ranks)]
    if areas(d, WHOLE) != pytest.approx(whole, rel=0.01):
        yield "other matrices are on all ranks"
    if words(d).count("+") != sum(m.cut == "sum" for m in cut.matrices) * (
        cut.ranks - 1
    ):
        yield "other matrices are added"


class WholeWeights(CutPicture):
    """A planted mistake: every rank has all of W."""

    def _matrix(self, d, m, rank, x, y):
        super()._matrix(d, replace(m, cut="whole") if m.name == "W" else m, rank, x, y)


class SameColumns(CutPicture):
    """A planted mistake: a part is drawn twice as wide."""

    def _matrix(self, d, m, rank, x, y):
        if m.cut == "column":
            m = Matrix(m.name, m.rows, m.columns, "sum")
        super()._matrix(d, m, rank, x, y)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("shape", [(128, 144, 576, 4), (4, 6, 8, 2)], ids=str)
def test_every_rank_is_drawn_with_its_own_part(how, shape):
    cut = cut_product(*shape, how=how)
    assert list(drawn_faults(CutPicture.draw, cut)) == []
    assert set(fills(matrix_cut(*shape, how), "rank 1")) == {rank_color(1)}
    assert matrix_cut(*shape, how).width <= ROOM


@pytest.mark.parametrize("wrong", [WholeWeights, SameColumns])
def test_a_wrong_picture_is_seen(wrong):
    def draw(picture, d):
        wrong(picture.cut).draw(d)

    assert list(drawn_faults(draw, cut_product(how="column")))


def test_sides_of_equal_length_are_equal():
    for shape in ((128, 144, 576, 2), (4, 6, 8, 2)):
        picture = CutPicture(cut_product(*shape, "column then row"))
        sides = [picture.side(n) for n in sorted(set(shape[:3]))]
        assert sides == sorted(sides)
        assert len(set(sides)) == 3
        assert max(sides) == picture.longest


def test_sliders_and_galleries():
    controls = {"ranks": [1, 2, 3, 4], "inner": (12, 288, 12), "columns": (12, 576, 12)}
    settings = [{"how": how} for how in ("column", "row")]
    check_sliders(matrix_cut, settings, how=list(HOW), **controls)


test_what_cannot_be_drawn = refused(
    (lambda: matrix_cut(how="diagonal"), "how is 'diagonal'; it can be 'column'"),
    (lambda: matrix_cut(0), "rows is 0"),
    (lambda: matrix_cut(ranks=9), "ranks is 9; .* 1 to 8"),
    (lambda: matrix_cut(8, 8, 9, 2), "columns is 9; 2 ranks need a multiple of 2"),
    (lambda: matrix_cut(8, 9, 8, 2, "row"), "inner is 9; 2 ranks need"),
)
