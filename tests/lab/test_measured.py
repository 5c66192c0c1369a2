"""Plots of what the meters recorded: what is drawn, in which units, clear errors."""

import io
from fractions import Fraction

import matplotlib
import pytest
from drawings import no_texts_overlap
from refusals import refused

matplotlib.use("agg")

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402

from ddp_course.lab import rank_color  # noqa: E402
from ddp_course.lab.draw.per_rank import plot_bytes  # noqa: E402
from ddp_course.lab.draw.sizes import plot_fit, size_name  # noqa: E402

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


# Wrong input.


test_what_cannot_be_drawn = refused(
    (lambda: plot_fit([1, 2], [1], abs), "2 sizes, 1 times"),
    (lambda: plot_fit([], [], abs), "0 sizes, 0 times"),
    (lambda: plot_fit([1], [float("nan")], abs), "the time of 1 B is nan"),
    (lambda: plot_bytes({}, {}), "at least one"),
    (lambda: plot_bytes({"a": [1]}, {"b": [1]}), r"measured are \['a'\]"),
    (lambda: plot_bytes({"a": [1]}, {"a": [1, 2]}), "'a' has 1 measured"),
)
