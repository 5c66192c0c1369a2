"""Plots of measured data: both curves seen, units on the axes, nothing left behind."""

import io

import matplotlib
import pytest
import torch
from drawings import no_texts_overlap

matplotlib.use("agg")

from matplotlib import pyplot  # noqa: E402

from ddp_course.lab import RANK_COLORS, curves, plot_losses, style  # noqa: E402

LOSSES = [4.5, 3.2, 2.9]


def svg(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def test_two_curves_on_top_of_each_other(capsys):
    figure = plot_losses({"1 process": LOSSES, "4 ranks": torch.tensor(LOSSES)})
    (axes,) = figure.axes
    below, above = axes.lines
    assert list(below.get_ydata()) == LOSSES
    assert list(above.get_ydata()) == pytest.approx(LOSSES)
    assert below.get_linewidth() > 3 * above.get_linewidth()
    assert below.get_linestyle() == "-" != above.get_linestyle()
    assert below.get_zorder() <= above.get_zorder()
    assert sum(matplotlib.colors.to_rgb(above.get_color())) < 1
    assert sum(matplotlib.colors.to_rgb(below.get_color())) > 2
    assert axes.get_ylabel() == "loss [nats per character]"
    assert axes.get_xlabel() == "step"
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["1 process", "4 ranks"]
    assert capsys.readouterr() == ("", "")


def test_nothing_is_left_open_or_changed():
    before = dict(matplotlib.rcParams)
    plot_losses({"a": LOSSES})
    assert pyplot.get_fignums() == []
    assert dict(matplotlib.rcParams) == before


def test_the_same_bytes_twice():
    with matplotlib.rc_context():
        style()
        first, second = (svg(plot_losses({"a": LOSSES, "b": LOSSES})) for _ in "ab")
    assert first == second
    with matplotlib.rc_context({"svg.hashsalt": None}):  # what style() is for
        assert svg(plot_losses({"a": LOSSES})) != svg(plot_losses({"a": LOSSES}))


def test_style_gives_rank_r_its_colour():
    with matplotlib.rc_context():
        style()
        figure, axes = pyplot.subplots()
        lines = [axes.plot([0, 1])[0] for _ in RANK_COLORS]
        pyplot.close(figure)
    assert tuple(line.get_color() for line in lines) == RANK_COLORS


@pytest.mark.parametrize("curves", [{}, dict.fromkeys("abcd", LOSSES)])
def test_too_few_or_too_many_curves(curves):
    with pytest.raises(ValueError, match="1 to 3 can be told apart"):
        plot_losses(curves)


def test_an_empty_curve():
    with pytest.raises(ValueError, match="the curve 'b' has no values"):
        plot_losses({"a": LOSSES, "b": []})


LINE = {"a": [(1, 2.0), (8, 16.0)], "b": [(1, 1.0), (8, 1.0)]}


def test_losses_of_every_20th_step():
    figure = plot_losses({"seldom": [3.0, 2.5, 2.0]}, every=20)
    assert list(figure.axes[0].lines[0].get_xdata()) == [20, 40, 60]


def test_curves_and_points():
    (axes,) = curves(LINE, {"a": [(4, 9.0)]}, "workers", "bytes [S]").axes
    points = [tuple(map(float, line.get_xydata()[0])) for line in axes.lines
              if line.get_marker() == "o" and len(line.get_xdata())]  # fmt: skip
    assert points == [(4.0, 9.0)]
    no_texts_overlap(lambda: curves(LINE, {}, "workers", "bytes [S]", log=True))
    with pytest.raises(ValueError, match="points"):
        curves(LINE, {"c": [(1, 1)]}, "x", "y")
