"""The figures of chapter 10 show what they are about, and nothing else."""

import pytest
from drawings import problems, words

from ddp_course.chapters.ch10_pipeline_parallel.figures import staircase

DRAWINGS = {
    "10": staircase,
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_layout(name):
    drawing = DRAWINGS[name]()
    assert list(problems(drawing)) == []
    assert drawing.svg() == DRAWINGS[name]().svg()
    assert len(drawing.description) > 60
    assert drawing.width <= 1100


def test_the_staircase_and_the_microbatches():
    drawing = staircase()
    said = [w for w in words(drawing) if w.startswith("waiting")]
    assert said == ["waiting: 75%", "waiting: 43%"]  # 3/4 and 3/(4 + 3)
    assert "in 21 instead of 48 units" in drawing.description
