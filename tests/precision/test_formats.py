"""Formats from their bits, against PyTorch's own types; updates and sums that round."""

from __future__ import annotations

import pytest
import torch

from ddp_course.precision import FORMATS, bits_of
from ddp_course.precision.rounding import (
    ORDERS,
    kahan_add_,
    lost,
    stochastic_round,
    sum_in_order,
)

TYPES = [f for f in FORMATS.values() if f.dtype is not None]
SMALL = [f for f in TYPES if f.bits <= 16]


def numbers(format) -> torch.Tensor:
    """Numbers of all sizes, and those at which rounding changes its mind."""
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** (torch.rand(4000, generator=generator) * 16 - 8)
    signed = torch.randn(4000, generator=generator).double() * sizes
    ends = [0.0, -0.0, format.max, format.max * 1.04, format.tiny, torch.inf, torch.nan]
    half = format.smallest / 2  # between 0 and the first: to even, which is 0
    more = torch.tensor([*ends, -torch.inf, half, half * 1.01], dtype=torch.float64)
    return torch.cat([signed, more])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("format", TYPES, ids=lambda f: f.name)
def test_ranges_and_rounding_are_pytorchs(format):
    info = torch.finfo(format.dtype)
    ours = format.max, format.tiny, format.eps, format.bits, format.smallest
    theirs = info.max, info.tiny, info.eps, info.bits, info.smallest_normal * info.eps
    assert ours == theirs
    x = numbers(format)
    theirs = x.to(format.dtype).double()
    if not format.has_inf and torch.__version__ < "2.13":  # nan beyond the largest
        theirs = torch.where(theirs.isnan(), x.clamp(-format.max, format.max), theirs)
    assert same(format.round(x), theirs)
    cut = torch.where(x.isfinite(), (x / format.spacing(x)).trunc(), x)
    assert not same(cut * format.spacing(x), theirs)  # no rounding


@pytest.mark.parametrize("format", SMALL, ids=lambda f: f.name)
def test_the_bits_of_every_number_are_pytorchs(format):
    whole = torch.int16 if format.bits == 16 else torch.uint8
    step = 1 if format.bits == 8 else 7
    patterns = list(range(0, 2**format.bits, step))
    values = torch.tensor(patterns).to(whole).view(format.dtype).double().tolist()
    for pattern, value in zip(patterns, values, strict=True):
        if value == value:  # there are many nans
            digits = f"{pattern:0{format.bits}b}"
            assert bits_of(value, format).replace(" ", "") == digits


def test_tf32_has_the_range_of_fp32_and_the_steps_of_fp16():
    tf32 = FORMATS["tf32"]
    assert (tf32.tiny, tf32.eps) == (FORMATS["fp32"].tiny, FORMATS["fp16"].eps)
    assert bits_of(1.5, tf32) == "0 01111111 1000000000"


def test_an_update_is_lost_below_half_a_spacing_and_three_cures():
    one, bf16 = torch.ones(1000, dtype=torch.bfloat16), FORMATS["bf16"]
    half = float(bf16.spacing(torch.ones(1))) / 2
    update = torch.tensor([half, half * 1.01, half / 10, 0.0], dtype=torch.bfloat16)
    assert lost(one[:4], update).tolist() == [True, False, True, False]
    small = torch.full_like(one, half / 10)
    plain, kahan, rest = one.clone(), one.clone(), torch.zeros_like(one)
    master, chance = one.float(), one.clone()
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        plain += small
        kahan_add_(kahan, rest, small)
        master += small.float()
        chance = stochastic_round(chance.float() + small, torch.bfloat16, generator)
    right = float(1 + 1000 * small[0].double())
    assert plain[0] == 1  # a weight that stands still
    assert abs(float(kahan[0]) - right) < half * 2
    assert abs(float(master[0]) - right) < 1e-4
    assert abs(float(chance.double().mean()) - right) < 0.01  # a mean of 1,000
    assert chance.unique().numel() > 3  # and noise


def test_stochastic_rounding_stays_between_neighbours_and_refuses_others():
    x = torch.tensor([1.002, -1.002, 3.0, torch.inf, torch.nan, 0.0, 0.0, 0.0])
    x.view(torch.int32)[-2:] = torch.tensor([0x7F800001, -1])  # nan by their last bits
    drawn = torch.stack([stochastic_round(x, torch.bfloat16) for _ in range(400)])
    assert set(drawn[:, 0].tolist()) == {1.0, 1.0078125}
    assert abs(float(drawn[:, 0].double().mean()) - 1.002) < 1e-3
    assert set(drawn[:, 1].tolist()) == {-1.0, -1.0078125}
    assert same(drawn[0, 2:], x[2:].bfloat16())
    with pytest.raises(ValueError, match=r"x is torch\.float64"):
        stochastic_round(x.double(), torch.bfloat16)


def test_the_error_of_a_sum_grows_with_the_ranks_and_with_the_order():
    generator = torch.Generator().manual_seed(0)
    eps, errors = FORMATS["bf16"].eps, {}
    for ranks in (2, 16, 256):
        values = torch.rand(ranks, 512, generator=generator).bfloat16()
        right = values.double().sum(0)
        for order in ORDERS:
            results = sum_in_order(values, torch.bfloat16, order)
            error = ((results.double() - right).abs() / right).max()
            deep = (ranks - 1).bit_length() if order == "tree" else ranks - 1
            assert error <= deep * eps / 2 * 1.01 + 1e-12, (ranks, order)
            errors[ranks, order] = float(error)
            exact = sum_in_order(values, torch.float32, order).double()
            assert ((exact - right).abs() / right).max() < 1e-5
    rows = torch.randn(5, 5, generator=generator).bfloat16()
    ring = sum_in_order(rows, torch.bfloat16, "ring")
    from_next = [rows.roll(-1 - k, 0)[:, k] for k in range(5)]  # rank k + 1 begins
    in_turn = [sum_in_order(row[:, None], torch.bfloat16) for row in from_next]
    assert torch.equal(ring, torch.cat(in_turn))
    for order in ORDERS:
        assert errors[2, order] < errors[16, order] < errors[256, order]
    assert errors[256, "tree"] < errors[256, "ring"] / 4
    with pytest.raises(ValueError, match="order is 'star'"):
        sum_in_order(values, torch.bfloat16, "star")
