"""The figures of chapter 18."""

import itertools

from drawings import laid_out

from ddp_course.chapters.ch18_how_fast.beside import Machine, Part
from ddp_course.chapters.ch18_how_fast.figures import published, roofline, steps
from ddp_course.planning.anchors import ANCHORS

test_the_layout = laid_out(
    steps, (steps, itertools.product((5, 50), (8, 72), ("h100", "b200")))
)


def test_slow_links_make_pure_zero_3_slower():
    fast, slow = (steps(network).description for network in (50, 5))
    seconds = [
        float(text.partition("recomputation: ")[2].split()[0]) for text in (fast, slow)
    ]
    assert seconds[1] > 2 * seconds[0]


def test_every_published_training_is_in_the_picture():
    words = published().axes[0].get_legend_handles_labels()[1]
    assert words == ["fitted", "predicted"]
    points = sum(len(line.get_xdata()) for line in published().axes[0].lines[1:])
    assert points == len(ANCHORS)


def test_a_roof_is_the_lower_of_both_limits():
    machine = Machine(100e9, 10e9)
    assert machine.ridge == 10
    slope = Part("sum", 1e9, 1e9, 0.2)  # 1 FLOP per byte: 5 GFLOP/s below 10
    flat = Part("product", 100e9, 1e9, 2.0)  # 100 per byte: 50 GFLOP/s below 100
    roof, *points = roofline(machine, [slope, flat]).axes[0].lines
    assert [*roof.get_xdata()][1] == 10 and [*roof.get_ydata()][1:] == [100, 100]
    drawn = [(*line.get_xdata(), *line.get_ydata()) for line in points]
    assert drawn == [(1, 5), (100, 50)]
