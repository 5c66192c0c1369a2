"""The figures of chapter 10 show what they are about, and nothing else."""

import re

import pytest
from drawings import laid_out, no_texts_overlap, words

from ddp_course.chapters.ch10_pipeline_parallel.figures import bubble_curve, staircase

test_the_layout = laid_out(staircase)


def test_the_staircase_and_the_microbatches():
    drawing = staircase()
    said = re.findall(r"waiting: \d+%", " ".join(words(drawing)))
    assert said == ["waiting: 75%", "waiting: 43%"]  # 3/4 and 3/(4 + 3)
    assert "rank 3: waits forward backward waits" in drawing.description
    assert "rank 3: waits 3F0 3F1 3F2 3F3 3B0 3B1" in drawing.description


MEASURED = {2: {1: 0.51, 4: 0.21}, 4: {4: 0.44}, 8: {}}


def shrinks(p, m):
    return (p - 1) / (m + p - 1)


def test_the_curves_are_the_formula():
    (axes,) = bubble_curve(MEASURED, shrinks, 12).axes
    curves = [line for line in axes.lines if len(line.get_xdata()) == 12]
    for line, p in zip(curves, MEASURED, strict=True):
        assert list(line.get_ydata()) == [100 * shrinks(p, m) for m in range(1, 13)]
    points = [line.get_xydata().tolist() for line in axes.lines
              if line.get_marker() == "o" and len(line.get_xdata())]  # fmt: skip
    assert points == [[[1, 51]], [[4, 21]], [[4, 44]]]
    no_texts_overlap(lambda: bubble_curve(MEASURED, shrinks, 12))
    with pytest.raises(ValueError, match="p = 2, m = 1: share 50 is not in 0 to 1"):
        bubble_curve({2: {1: 50}}, shrinks, 12)
