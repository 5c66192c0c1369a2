"""The capstone: memory has a limit, and what is predicted best fits."""

import pytest
import torch
from torch import nn

from ddp_course.bench.emulated import LimitedMemory, OutOfMemory
from ddp_course.bench.predict import wrong_draws
from ddp_course.chapters.ch18_how_fast.capstone import (
    LIMIT,
    best_found,
    choices,
    cluster_of,
    foreseen,
)
from ddp_course.planning.step_time import Candidate


def test_memory_beyond_the_limit_is_an_error_that_names_both_numbers():
    model = nn.Linear(1000, 1000, bias=False)  # 4 MB
    x = torch.zeros(10, 1000)
    with LimitedMemory(4.1e6, model):
        model(x)
    with pytest.raises(OutOfMemory, match="keeps 4.04 MB, and has 4.02 MB; use"):
        with LimitedMemory(4.02e6, model):
            model(x)


@pytest.mark.parametrize("ranks", [4, 8])
def test_memory_decides_which_layout_is_best(ranks):
    cluster = cluster_of(ranks)
    every = [foreseen(layout, cluster) for layout in choices(ranks)]
    fastest = min(every, key=lambda each: each.seconds)
    assert fastest.ledger.total > LIMIT > best_found(cluster).ledger.total
    alone = foreseen(Candidate(dp=ranks, microbatch=16 // ranks), cluster)
    assert alone.ledger.total > 2 * LIMIT


def test_a_wrong_order_counts_only_beyond_what_is_taken_as_equal():
    times = [1.0 + k / 10 for k in range(20)]
    swapped = [times[1], times[0], *times[2:]]
    assert wrong_draws(times, times) == 0
    assert wrong_draws(times, swapped) > 0
    assert wrong_draws(times, swapped, equal=0.11) == 0
    assert wrong_draws(times, times[::-1], equal=0.11) == 100
