"""The figures of chapter 17."""

import itertools

import pytest
import torch
from drawings import fills, laid_out

from ddp_course.chapters.ch17_experts.figures import (
    CHOICES,
    TOKENS,
    journey,
    load_map,
    popular,
    work,
)
from ddp_course.experts.balance import within_capacity
from ddp_course.lab.palette import rank_color

SKEWS, FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0), (None, 1.0, 1.25, 2.0, 3.0)
test_the_layout = laid_out(journey, (work, itertools.product(SKEWS, FACTORS)))


def test_every_token_is_drawn_three_times_in_its_ranks_colour():
    for expert in range(4):
        colors = [
            rank_color(r) for r in range(4) for one in CHOICES[r] if one == expert
        ]
        assert sorted(fills(journey(), f"{expert}")) == sorted(3 * colors)
    assert "expert 0 has 5" in journey().description


@pytest.mark.parametrize("skew", SKEWS)
def test_every_token_has_two_experts(skew):
    loads = popular(skew)
    assert sum(loads) == 2 * TOKENS and max(loads) <= TOKENS
    assert loads == sorted(loads, reverse=True)


def test_what_is_dropped_is_what_the_package_drops():
    loads = popular(1.5)
    queue = torch.tensor([e for e, load in enumerate(loads) for _ in range(load)])
    kept = within_capacity(queue[:, None], 8, 20)
    assert f"{int((~kept).sum())} of 128" in work(1.5, 1.25).title


def test_a_map_says_the_last_shares():
    shares = torch.zeros(60, 8)
    shares[:, 3] = 50
    figure = load_map({"a": shares, "b": shares})
    assert "[0, 0, 0, 50, 0, 0, 0, 0]" in figure._ipython_display_.args[1]
