"""The figures of chapter 11 show what they are about, and nothing else."""

import re

import pytest
from drawings import problems, words

from ddp_course.chapters.ch11_pipeline_schedules.figures import two_orders
from ddp_course.chapters.ch11_pipeline_schedules.plane import memory_against_bubble

DRAWINGS = {
    "11": two_orders,
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_layout(name):
    drawing = DRAWINGS[name]()
    assert list(problems(drawing)) == []
    assert drawing.svg() == DRAWINGS[name]().svg()
    assert len(drawing.description) > 60
    assert drawing.width <= 1100


def test_the_opening_of_chapter_11_does_not_tell_what_is_to_be_predicted():
    drawing = two_orders()
    told = " ".join([*words(drawing), drawing.description])
    assert not re.search(r"%|keeps|bubble \d|1F1B|27\.3", told)
    assert "GPipe" in words(drawing) and "Zero bubble (ZB-H1)" in words(drawing)


def test_who_is_beaten_in_both_is_hollow():
    rows = [("gpipe", 8, 0.27), ("1f1b", 4, 0.27), ("interleaved", 5.5, 0.16)]
    (axes,) = memory_against_bubble(rows).axes
    drawn = [line for line in axes.lines if len(line.get_xdata())]
    assert [line.get_xydata().tolist() for line in drawn] == [
        [[peak, pytest.approx(100 * share)]] for _, peak, share in rows
    ]
    hollow = [line.get_markerfacecolor() == "white" for line in drawn]
    assert hollow == [True, False, False]  # 1F1B keeps less, and waits no longer


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: memory_against_bubble([]), "no rows"),
        (lambda: memory_against_bubble([("a", 0, 0.5)]), "'a' keeps 0 microbatches"),
        (lambda: memory_against_bubble([("a", 1, 5)]), "the bubble of 'a' is 5"),
    ],
)
def test_what_cannot_be_drawn(bad, says):
    with pytest.raises(ValueError, match=says):
        bad()
