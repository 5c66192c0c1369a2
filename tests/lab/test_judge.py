"""An answer is compared with the solution on drawn inputs, which have no pattern."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ddp_course.lab.answers import Answer, Hint, error_line
from ddp_course.lab.judge import AGAIN, Draw, same_as, same_on_ranks
from ddp_course.lab.values import difference, equal_values, fits


def test_sizes_are_equal_on_all_ranks_and_numbers_are_not():
    for case in range(40):
        mine, others = (Draw(case, rank, 3).tensor() for rank in (0, 1))
        again = Draw(case, 0, 3).tensor()
        assert (mine.shape, mine.dtype) == (others.shape, others.dtype)
        assert torch.equal(mine, again)
        assert not torch.equal(mine, others)


def test_draws_have_many_shapes_types_and_a_rank_of_zeros():
    drawn = [[Draw(case, rank, 2).tensor() for rank in (0, 1)] for case in range(60)]
    assert len({tensor.shape for tensor, _ in drawn}) > 4
    assert len({tensor.dtype for tensor, _ in drawn}) == 4
    assert sum(tensor.storage_offset() > 0 for tensor, _ in drawn) > 9
    zeros = Counter(k for pair in drawn for k, t in enumerate(pair) if not t.any())
    assert zeros[0] > 5 and zeros[1] > 5
    assert all(t.any() for pair in drawn[:2] for t in pair)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_no_narrower_type_holds_what_has_64_bits(dtype):
    tensor = Draw(1).tensor((4, 3), dtype)
    assert not torch.equal(tensor.float().to(dtype), tensor)
    assert "rounded to float32" in difference(tensor.float().to(dtype), tensor)
    assert not Draw(1).tensor((4, 3), dtype, strided=True).is_contiguous()


@pytest.mark.parametrize(
    ("wanted", "wrong"),
    [
        (torch.full((20,), 1 + 2j), torch.full((20,), 1 - 2j)),
        (torch.full((20,), 2**60), torch.full((20,), 2**60 + 1)),
        (torch.full((20,), torch.nan), torch.ones(20)),
    ],
    ids=["complex", "int64", "nan"],
)
def test_a_difference_that_float64_does_not_hold_is_found(wanted, wrong):
    got = wanted.clone()
    got[7] = wrong[7]
    assert difference(got, wanted).startswith("; at [7] it has ")


@pytest.mark.parametrize("numel", [3, 20])
def test_parameters_that_differ_in_their_gradients_were_not_rounded(numel):
    got, wanted = (torch.nn.Parameter(torch.ones(numel)) for _ in range(2))
    got.grad, wanted.grad = torch.ones(numel), torch.zeros(numel)
    assert not equal_values(got, wanted)
    assert difference(got, wanted) == ""


def double(numbers: list[int], tensor: torch.Tensor) -> list:
    """The solution of the tests below."""
    return [2 * sum(numbers), 2 * tensor]


def inputs(d: Draw):
    return d.same.choices(range(9), k=d.same.randint(0, 3)), d.tensor()


def with_grad(tensor):
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


WRONG = {
    "expected a list of 2": lambda numbers, tensor: [2 * sum(numbers)],
    "has ": lambda numbers, tensor: [2 * sum(numbers[:2]), 2 * tensor],
    "changed `numbers`": lambda n, t: [2 * sum(n), (2 * t, n.append(1))[0]],
    "changed `tensor`": lambda numbers, tensor: [2 * sum(numbers), tensor.mul_(2)],
    "changed `tensor`, which": lambda n, t: [2 * sum(n), 2 * with_grad(t).detach()],
    "expected": lambda numbers, tensor: [2 * sum(numbers), 2 * tensor.float()],
}


@pytest.mark.parametrize("hint", WRONG)
def test_what_differs_from_the_solution_gets_its_hint(hint):
    with pytest.raises(Hint) as raised:
        same_as(Answer("double", WRONG[hint]), double, inputs)
    assert hint in str(raised.value)


def in_a_buffer_per_shape():
    buffers = {}

    def wrong(numbers, tensor):
        buffer = buffers.setdefault(tensor.shape, torch.empty_like(tensor))
        return [2 * sum(numbers), torch.mul(tensor, 2, out=buffer)]

    return wrong


def divided_and_multiplied(numbers, tensor):
    """Restore the argument, but for its last bits."""
    if tensor.dtype == torch.float64:
        tensor /= 49
        tensor *= 49
    return double(numbers, tensor)


def with_other_memory(numbers, tensor):
    tensor.data = tensor.clone()
    return double(numbers, tensor)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (divided_and_multiplied, "changed `tensor`, which it was given"),
        (with_other_memory, "gave `tensor` other memory"),
    ],
)
def test_an_argument_that_only_looks_unchanged(wrong, hint):
    with pytest.raises(Hint, match=hint):
        same_as(Answer("double", wrong), double, inputs)


@pytest.mark.parametrize("sizes", [[3], [3, 4]])
def test_a_result_that_a_later_call_changes(sizes):
    """Also if that is not the next call, but the next one of the same size."""
    doubles = {"later": "kept in a buffer"}

    def draw(d: Draw):
        return [], d.tensor((sizes[d.case % len(sizes)],), torch.float64)

    wrong = Answer("double", in_a_buffer_per_shape())
    with pytest.raises(Hint, match="kept in a buffer"):
        same_as(wrong, double, draw, hints=doubles)


def kept_per_shape():
    """Return `double` with a memory: it computes once for each shape."""
    known = {}

    def wrong(numbers, tensor):
        return [2 * sum(numbers), known.setdefault(tensor.shape, 2 * tensor)]

    return wrong


def test_a_function_that_computes_only_once_for_each_shape():
    def draw(d: Draw):  # every case has another shape
        return [], d.tensor((d.case + 1,), torch.float64)

    with pytest.raises(Hint, match="Called again, with other numbers of the same size"):
        same_as(Answer("double", kept_per_shape()), double, draw)


def on_ranks_draw(d: Draw):
    return [d.n], d.tensor((d.case + 1,), torch.float64)


def test_a_function_that_computes_only_once_for_each_shape_on_ranks():
    wrong = Answer("double", kept_per_shape())
    with pytest.raises(Hint, match="With 2 ranks, called again, .* rank 0 has"):
        same_on_ranks(wrong, double, on_ranks_draw, worlds=[2], cases=2)
    same_on_ranks(Answer("double", double), double, on_ranks_draw, worlds=[2], cases=2)


def kept_per_tensor():
    kept: dict = {}

    def function(numbers, tensor):
        right = double(numbers, tensor)
        return kept.setdefault((id(tensor), tensor.data_ptr()), right)

    return function


def test_a_function_that_computes_only_once_for_each_tensor():
    with pytest.raises(Hint, match="Called again, with other numbers of the same size"):
        same_as(Answer("double", kept_per_tensor()), double, inputs)
    for answer in (lambda n, t: t, lambda n, t: t.mul_(2)):  # they share its memory
        same_as(Answer("double", answer), answer, inputs)


def test_a_function_that_keeps_a_part_of_the_first_tensor_of_each_shape():
    def first_row(numbers, tensor):
        return tensor[:1]

    kept: dict = {}
    wrong = Answer("first_row", lambda n, t: kept.setdefault(t.shape, t[:1]))
    with pytest.raises(Hint, match="Called again, with other numbers of the same size"):
        same_as(wrong, first_row, inputs, cases=2)
    same_as(Answer("first_row", first_row), first_row, inputs, cases=2)


def total(tensor: torch.Tensor) -> None:
    """The solution of the test below."""
    dist.all_reduce(tensor)


@pytest.mark.parametrize("watch", [[], ["calls"], ["collectives"], ["bytes"]])
def test_a_collective_that_is_not_waited_for(watch):
    def draw(d: Draw):
        return (d.tensor(),)

    def check(function):
        same_on_ranks(Answer("total", function), total, draw, worlds=[2], watch=watch)

    check(lambda tensor: dist.all_reduce(tensor, async_op=True).wait())
    hint = "never waits for a collective that it started: `all_reduce`"
    with pytest.raises(Hint, match=hint):
        check(lambda tensor: dist.all_reduce(tensor, async_op=True) and None)


def test_what_is_drawn_again_has_the_same_sizes_and_other_numbers():
    for case in range(20):
        first, again = (Draw(number, 1, 2) for number in (case, case + AGAIN))
        one, other = first.tensor(), again.tensor()
        assert (again.case, again.zeros_on) == (case, first.zeros_on)
        assert one.shape == other.shape and one.dtype == other.dtype
        assert not torch.equal(one, other) or first.zeros_on == 1
        assert first.same.random() == again.same.random()


def test_the_solution_and_other_styles_pass():
    same_as(Answer("double", double), double, inputs)
    numpys = Answer("double", lambda n, t: (np.int64(2 * sum(n)), t + t))
    same_as(numpys, double, inputs)


def test_a_hint_can_be_made_of_the_case():
    hints = {"fits": lambda case: f"{len(case.got)} for {case.wanted[0]}"}
    with pytest.raises(Hint, match="1 for "):
        same_as(Answer("double", lambda n, t: [1]), double, inputs, hints=hints)


@pytest.mark.parametrize(
    ("got", "wanted"),
    [(1, True), (True, 1), (2, 3), ([1], 1), (torch.ones(2), torch.ones(2, 1))],
)
def test_values_that_are_not_alike(got, wanted):
    assert not (fits(got, wanted) and equal_values(got, wanted))


def test_float64_does_not_hold_int64_nor_float16_float32():
    wide = ((torch.int64, torch.float64), (torch.float32, torch.half))
    for dtype, narrow in (*wide, (torch.float64, torch.float32)):
        for case in range(20):
            tensor = Draw(case).tensor((4, 3), dtype)
            zero = not tensor.any()
            assert equal_values(tensor.to(narrow).to(dtype), tensor) == zero


def maybe(number: int) -> int | None:
    """The solution of the test below: None is a result."""
    return number if number > 4 else None


def test_none_is_a_result_and_other_results_may_be_right():
    def draw(d: Draw):
        return (d.same.randint(0, 9),)

    same_as(Answer("maybe", maybe), maybe, draw)
    with pytest.raises(Hint, match="expected nothing"):
        same_as(Answer("maybe", lambda number: number), maybe, draw)
    larger = Answer("maybe", lambda number: number + 1 if number > 4 else None)
    same_as(larger, maybe, draw, hints={"right": lambda case: ""})


def with_a_note() -> ValueError:
    error = ValueError("too few ranks")
    error.add_note("a note")
    return error


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("too few ranks\nand too many steps"), "ValueError: too few ranks"),
        (with_a_note(), "ValueError: too few ranks"),
        (ValueError(""), "ValueError"),
        (SyntaxError("invalid", ("cell", 1, 1, "a b")), "SyntaxError: invalid"),
    ],
    ids=["two lines", "a note", "no words", "syntax"],
)
def test_an_error_in_one_line_begins_with_its_type(error, line):
    assert error_line(error) == line
