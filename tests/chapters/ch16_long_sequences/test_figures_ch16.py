"""The figures of chapter 16."""

import itertools

import pytest
from drawings import fills, laid_out

from ddp_course.chapters.ch16_long_sequences.figures import LENGTH, around, shares
from ddp_course.context_parallel.assignment import ASSIGNMENTS
from ddp_course.lab.palette import rank_color
from ddp_course.theory import causal_pairs

STEPS = (None, 0, 1)
test_the_layout = laid_out(
    around,
    (around, (2, 3, 5)),
    (shares, itertools.product(ASSIGNMENTS, (1, 2, 4, 8), STEPS)),
)


def test_every_rank_has_every_key_once():
    d = around()
    assert "rank 1 has the keys of rank 1, then 0, then 3, then 2" in d.description
    for rank in range(4):
        assert fills(d, f"queries of {rank}") == [rank_color(rank)]
        assert fills(d, f"keys of {rank}") == 4 * [rank_color(rank)]


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_the_pairs_are_the_formulas(assignment):
    pairs = causal_pairs(assignment, LENGTH, 4)
    words = ", ".join(f"rank {rank} {count}" for rank, count in enumerate(pairs))
    assert shares(assignment, 4).description.endswith(f"all steps: {words}.")


def test_a_step_of_zigzag_is_fair():
    assert shares("zigzag", 4, 1).description.endswith("rank 0 8, rank 1 8, rank 2 8, "
                                                       "rank 3 8.")  # fmt: skip
