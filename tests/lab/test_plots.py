"""Plots of measured data: both curves seen, units on the axes, clear errors."""

import contextlib
import io
import threading
from fractions import Fraction

import matplotlib
import pytest
import torch
from drawings import no_texts_overlap
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from refusals import refused

from ddp_course.lab import RANK_COLORS, curves, plot_losses, rank_color, style
from ddp_course.lab.draw.per_rank import plot_bytes
from ddp_course.lab.draw.plots import canvas
from ddp_course.lab.draw.sizes import plot_fit, size_name
from ddp_course.launch import spawn

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


LINE = {"a": [(1, 2.0), (8, 16.0)], "b": [(1, 1.0), (8, 1.0)]}


def test_losses_of_every_20th_step():
    figure = plot_losses({"seldom": [3.0, 2.5, 2.0]}, every=20)
    assert list(figure.axes[0].lines[0].get_xdata()) == [20, 40, 60]


def test_curves_and_points():
    (axes,) = curves(LINE, {"a": [(4, 9.0)]}, "workers", "bytes [S]").axes
    points = [tuple(map(float, line.get_xydata()[0])) for line in axes.lines
              if line.get_marker() == "o" and len(line.get_xdata())]  # fmt: skip
    assert points == [(4.0, 9.0)]
    no_texts_overlap(lambda: curves(LINE, {}, "workers", "bytes [S]"))


# What the meters recorded.

SIZES = [2**k for k in range(10, 27, 2)]
BYTES = {"naive": [3, 1, 1, 1], "ring": [Fraction(3, 2)] * 4}
FIGURES = {
    "fit": lambda: plot_fit(SIZES, [1e-4 + 1e-9 * n for n in SIZES], lambda n: 1e-4),
    "bytes": lambda: plot_bytes(BYTES, BYTES),
}


@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_overlap_and_nothing_is_left_behind(name, capsys):
    figure = no_texts_overlap(FIGURES[name])
    figure.savefig(io.BytesIO(), format="png")
    assert capsys.readouterr() == ("", "")


# Times against sizes.


def test_sizes_are_written_with_their_unit():
    names = [size_name(n) for n in (8, 1024, 65536, 2**20, 3 * 2**29, 2**40)]
    assert names == ["8 B", "1 KiB", "64 KiB", "1 MiB", "1.5 GiB", "1.02e+03 GiB"]
    figure = plot_fit(SIZES, [1e-4] * len(SIZES), lambda n: 1e-4)
    FigureCanvasAgg(figure).draw()
    ticks = [t.get_text() for t in figure.axes[0].get_xticklabels()]
    assert ticks == ["1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"]


def test_a_fit_shows_points_and_line():
    seconds = [1e-4 + 1e-9 * n for n in SIZES]
    (axes,) = plot_fit(SIZES, seconds, lambda n: 2e-4 + 1e-9 * n).axes
    line, points = axes.lines
    assert points.get_linestyle() == "None"
    assert list(points.get_ydata()) == pytest.approx([s * 1e3 for s in seconds])
    assert line.get_xydata()[-1] == pytest.approx([2**26, 0.2 + 2**26 * 1e-6])
    assert axes.get_xscale() == axes.get_yscale() == "log"


# A bar or a row for each rank.


def test_bytes_are_bars_in_the_ranks_colours():
    (axes,) = plot_bytes(BYTES, {"naive": [3, 1, 1, 1], "ring": [1] * 4}).axes
    bars = [bar for bar in axes.patches if bar.get_height()]
    assert [bar.get_height() for bar in bars] == [3, 1, 1, 1, 1.5, 1.5, 1.5, 1.5]
    colors = [to_hex(bar.get_facecolor()).upper() for bar in bars]
    assert colors == [rank_color(rank) for rank in range(4)] * 2
    marks = [line for line in axes.lines if len(line.get_ydata())]
    theory = [line.get_ydata()[0] for line in marks if line.get_color() != "white"]
    assert theory == [3, 1, 1, 1, 1, 1, 1, 1]
    for mark, bar in zip(marks[1::2], bars, strict=True):
        left, right = mark.get_xdata()
        assert left < bar.get_x() < bar.get_x() + bar.get_width() < right
    ticks = [text.get_text() for text in axes.get_xticklabels()]
    assert ticks == ["0", "1", "2", "3"] * 2


def test_the_first_figure_warns_of_no_fonts(tmp_path):
    """A warning in a cell's output made notebooks fail on a busy machine."""

    def first_figure():  # in a process that has not imported matplotlib
        timer = threading.Timer
        threading.Timer = lambda seconds, call: timer(0, call)  # as on a slow machine
        with contextlib.redirect_stderr(io.StringIO()) as said:
            canvas()
        return said.getvalue()

    environ = {"MPLCONFIGDIR": str(tmp_path)}
    assert spawn(first_figure, world_size=1, env=environ, output="none") == [""]
    assert [*tmp_path.glob("fontlist*")]  # the fonts were searched


test_what_cannot_be_drawn = refused(
    (lambda: plot_losses({}), "0 curves; 1 to 3 can be told apart"),
    (lambda: plot_losses(dict.fromkeys("abcd", LOSSES)), "4 curves; 1 to 3 can be"),
    (lambda: plot_losses({"a": LOSSES, "b": []}), "the curve 'b' has no values"),
    (lambda: curves(LINE, {"c": [(1, 1)]}, "x", "y"), "points"),
    (lambda: plot_fit([1, 2], [1], abs), "2 sizes and 1 times"),
    (lambda: plot_fit([], [], abs), "0 sizes and 0 times"),
    (lambda: plot_fit([1], [float("nan")], abs), "the time of 1 B is nan"),
    (lambda: plot_bytes({}, {}), "at least one"),
    (lambda: plot_bytes({"a": [1]}, {"b": [1]}), r"has the algorithms \['a'\]"),
    (lambda: plot_bytes({"a": [1]}, {"a": [1, 2]}), "'a' has 1 measured"),
)
