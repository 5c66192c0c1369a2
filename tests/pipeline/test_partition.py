"""Stages by cost: against all partitions there are, and what a layer costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddp_course.model import PRESETS, build_gpt
from ddp_course.pipeline import partition


def stage_costs(costs, sizes):
    """Return what each stage costs, of so many layers each."""
    ends = accumulate(sizes, initial=0)
    return [sum(costs[first:last]) for first, last in pairwise(ends)]


def every_partition(costs, num_stages):
    """Yield all sizes that the number of stages leaves."""
    for inner in combinations(range(1, len(costs)), num_stages - 1):
        yield [last - first for first, last in pairwise([0, *inner, len(costs)])]


@settings(max_examples=100, deadline=None)
@given(
    costs=st.lists(st.integers(0, 9) | st.fractions(0, 3), min_size=1, max_size=8),
    data=st.data(),
)
def test_no_partition_is_better(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    found = partition(costs, num_stages)
    assert min(found) >= 1 and sum(found) == len(costs)

    def price(sizes):
        stages = stage_costs(costs, sizes)
        return max(stages), sum(cost**2 for cost in stages)

    assert price(found) == min(map(price, every_partition(costs, num_stages)))
    assert partition(costs, num_stages) == found


def test_what_is_cheap_goes_with_what_is_dear():
    assert partition([0, 4, 4, 4, 4, 1], 2) == (3, 3)
    assert partition([0, 4, 4, 4, 4, 6], 2) == (4, 2)
    assert partition([1, 1, 1, 9], 2) == (3, 1)
    assert partition([5], 1) == (1,)
    assert partition([0.5, 0.5, 0.5], 3) == (1, 1, 1)
    # Stages of 4, 3, 1 would be no slower than 4, 2, 2, but less alike.
    assert partition([4, 1, 1, 1, 1], 3) == (1, 2, 2)


def test_the_gpt_on_two_three_and_four_ranks():
    """The embedding costs nothing and the head little: each goes with a block."""
    costs = PRESETS["1m"].layer_costs
    assert partition(costs, 2) == (3, 3)
    assert partition(costs, 4) == (2, 1, 1, 2)
    assert max(stage_costs(costs, (2, 1, 1, 2))) == costs[1] + costs[5]
    three = max(stage_costs(costs, partition(costs, 3)))
    assert three == max(stage_costs(costs, (2, 2, 2)))
    assert partition(PRESETS["8m"].layer_costs, 4) == (3, 2, 2, 3)


test_bad_partitions = refused(
    (lambda: partition([1, 2], 3), "num_stages is 3; there are 2 layers"),
    (lambda: partition([], 1), "num_stages is 1; there are 0 layers"),
    (lambda: partition([1, 2], 0), "num_stages is 0"),
    (lambda: partition([1, 2], 1.5), "num_stages is 1.5"),
    (lambda: partition([1, -2], 1), r"costs\[1\] is -2"),
    (lambda: partition([float("nan"), 2], 1), r"costs\[0\] is nan"),
)


@pytest.mark.parametrize(("preset", "tokens"), [("1m", None), ("1m", 16), ("8m", 128)])
def test_multiply_adds_are_those_that_pytorch_counts(preset, tokens):
    config = PRESETS[preset]
    config = replace(config, block_size=tokens or config.block_size)
    model = build_gpt(config)
    x = torch.zeros(1, config.block_size, dtype=torch.int64)
    counted = []
    # The counter does not know the CPU's fused attention: have it done in products.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for layer in (model.embed, *model.blocks, model.head):
            with FlopCounterMode(display=False) as counter:
                x = layer(x)
            counted.append(counter.get_total_flops() / 2)
    assert config.layer_costs == counted
