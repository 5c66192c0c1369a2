"""The figures of chapter 13."""

import itertools

import pytest
from drawings import laid_out, words

from ddp_course.chapters.ch13_async.figures import (
    MODES,
    timelines,
    twice,
    two_ways,
    waiting,
)
from ddp_course.parameter_server import ASYNCHRONOUS, simulate_run

test_the_layout = laid_out(
    two_ways, (waiting, itertools.product(MODES, (1, 4, 8), (2,)))
)


def test_what_the_timelines_say():
    text = two_ways().description
    assert "rank 1: 0 waits 1 waits" in text.partition("Asynchronous")[0]
    assert "waits" not in text.partition("Asynchronous")[2]
    assert "dropped" in words(waiting("backup"))
    assert "updates by 12" in waiting("bounded", 4, 3).description
    record = simulate_run(ASYNCHRONOUS, [0.1, 0.1, 0.4], 20)
    text = timelines({"as it was": record}, 400, unit=1000).description
    assert text.startswith("as it was: 9 updates by 400. rank 1: 0 1 2 3; rank 2: 0")


RUN = {"waits": [(0, 0.0, 4.0), (5, 2.0, 3.5)], "goes on": [(0, 0, 4.0), (9, 2, 3.7)]}


def test_the_same_losses_twice():
    figure = twice(RUN)
    for axes, column in zip(figure.axes, (0, 1), strict=True):
        for line, points in zip(axes.lines, RUN.values(), strict=True):
            assert list(line.get_xdata()) == [point[column] for point in points]
            assert list(line.get_ydata()) == [point[2] for point in points]
    with pytest.raises(ValueError, match="0 runs"):
        twice({})
