"""The figures of chapter 07 show what they are about, and nothing else."""

from drawings import fills, laid_out, words

from ddp_course.chapters.ch07_zero.figures import ZERO_STAGES, zero_stages
from ddp_course.lab import rank_color

test_the_layout = laid_out(zero_stages)


def test_stages_store_what_the_paper_says():
    assert [stage.nbytes for stage in ZERO_STAGES] == [16, 10, 7]
    said = words(zero_stages())
    assert "3/4" not in said  # what is to be predicted
    assert "4 + 4 + 8 = 16 bytes" in said
    assert "4 + 4 + 8/4 = 10 bytes" in said
    assert "4 + 4/4 + 8/4 = 7 bytes" in said


def test_what_is_sharded_is_there_once():
    drawing = zero_stages()
    for rank in range(4):
        colors = fills(drawing, f"{rank}")
        sample = rank == 2  # of the legend
        # A name in each of three panels; states in two of them, gradients in one.
        assert colors == [rank_color(rank)] * (3 + 2 + 1 + sample)
