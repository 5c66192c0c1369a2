"""The figures of chapter 03 show what they are about, and nothing else."""

import itertools

from drawings import fills, laid_out, words
from refusals import refused

from ddp_course.chapters.ch03_all_reduce.figures import hierarchy, ring, six_ways
from ddp_course.lab.palette import rank_color

test_the_layout = laid_out(
    ring,
    six_ways,
    (hierarchy, itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 5, 8))),
)


def test_six_ways_tells_the_plans_numbers():
    said = words(six_ways())
    assert said.count("6 steps") == 2  # naive and ring
    assert said.count("4 steps") == 3
    assert "no message is sent" in said
    assert not any("3/2" in word for word in said)  # it is to be predicted
    for rank in range(4):
        found = fills(six_ways(), f"{rank}")
        assert found == [rank_color(rank)] * 6


def test_hierarchy_tells_what_each_phase_sends():
    said = words(hierarchy(2, 4))
    assert said.count("fast links; each rank sends 3/4 S") == 2
    assert "slow links; each rank sends 1/4 S" in said
    for rank in range(8):
        assert fills(hierarchy(2, 4), f"{rank}") == [rank_color(rank)] * 3


test_what_cannot_be_drawn = refused(
    (lambda: hierarchy(0), "nnodes is 0; .* 1 to 4"),
    (lambda: hierarchy(2, 9), "nproc_per_node is 9; .* 1 to 8"),
)
