"""Plots of what the meters recorded: what is drawn, in which units, clear errors."""

import io
from fractions import Fraction

import matplotlib
import pytest
from drawings import no_texts_overlap

matplotlib.use("agg")

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402

from ddp_course.lab import rank_color  # noqa: E402
from ddp_course.lab.draw.per_rank import plot_bytes  # noqa: E402
from ddp_course.lab.draw.sizes import (  # noqa: E402
    plot_fit,
    plot_sizes,
    size_name,  # noqa: E402
)
from ddp_course.lab.palette import RANK_COLORS  # noqa: E402

SIZES = [2**k for k in range(10, 27, 2)]
CURVES = {
    name: {size: alpha + beta * size for size in SIZES}
    for name, alpha, beta in [
        ("naive", 3e-4, 2.4e-9),
        ("tree", 2e-4, 1.6e-9),
        ("ring", 4e-4, 5.5e-10),
        ("gloo", 2.5e-4, 6e-10),
        ("shared memory", 5e-5, 2.2e-10),
    ]
}
LIMITS = {"memory": 12 * 2**30, "loopback": 3 * 2**30}
BYTES = {"naive": [3, 1, 1, 1], "ring": [Fraction(3, 2)] * 4}
FIGURES = {
    "sizes": lambda: plot_sizes(CURVES, LIMITS, 1.5),
    "one curve": lambda: plot_sizes({"ring": CURVES["ring"]}),
    "one size": lambda: plot_sizes({"ring": {1024: 1e-3}}),
    "close curves": lambda: plot_sizes({f"gl {k}": CURVES["ring"] for k in range(9)}),
    "fit": lambda: plot_fit(SIZES, [1e-4 + 1e-9 * n for n in SIZES], lambda n: 1e-4),
    "bytes": lambda: plot_bytes(BYTES, BYTES),
}


@pytest.mark.parametrize("name", FIGURES)
def test_texts_do_not_overlap_and_nothing_is_left_behind(name, capsys):
    figure = no_texts_overlap(FIGURES[name])
    figure.savefig(io.BytesIO(), format="png")
    assert capsys.readouterr() == ("", "")


# Times against sizes.


def test_both_panels_show_every_curve_in_its_unit():
    times, rates = plot_sizes(CURVES, busbw_factor=1.5).axes
    for axes in (times, rates):
        assert [line.get_label() for line in axes.lines] == list(CURVES)
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert {text.get_text() for text in axes.texts} == set(CURVES)
    ring = list(CURVES).index("ring")
    at = CURVES["ring"][1024]
    assert times.lines[ring].get_xydata()[0] == pytest.approx([1024, at * 1e3])
    rate = 1024 * 1.5 / at / 2**30
    assert rates.lines[ring].get_xydata()[0] == pytest.approx([1024, rate])
    assert times.get_ylabel() == "time [ms]"
    assert rates.get_ylabel() == "bus bandwidth [GiB/s]"


def test_no_two_curves_look_the_same_and_none_like_a_rank():
    times, _ = plot_sizes(CURVES).axes
    looks = [
        (line.get_marker(), str(line._dash_pattern), line.get_color())
        for line in times.lines
    ]
    assert len(set(looks)) == len(CURVES)
    assert not {color for *_, color in looks} & set(RANK_COLORS)
    assert len({marker for marker, *_ in looks}) == len(CURVES)
    widths = {line.get_label(): line.get_linewidth() for line in times.lines}
    assert max(widths, key=widths.get) == "shared memory"  # the fastest of ours
    assert sorted(widths, key=widths.get)[-2] == "gloo"


def test_limits_are_lines_with_names():
    _, rates = plot_sizes(CURVES, LIMITS).axes
    lines = [line for line in rates.lines if len(set(line.get_ydata())) == 1]
    assert [line.get_ydata()[0] for line in lines] == [12, 3]
    assert {"memory", "loopback"} <= {text.get_text() for text in rates.texts}
    assert rates.get_ylim()[1] > 12


def test_sizes_are_written_with_their_unit():
    names = [size_name(n) for n in (8, 1024, 65536, 2**20, 3 * 2**29, 2**40)]
    assert names == ["8 B", "1 KiB", "64 KiB", "1 MiB", "1.5 GiB", "1.02e+03 GiB"]
    figure = plot_sizes(CURVES)
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


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: plot_sizes({}), "0 curves"),
        (lambda: plot_sizes({f"{k}": {1: 1} for k in range(10)}), "10 curves.* 1 to 9"),
        (lambda: plot_sizes({"gloo": {1: 1}, "gloo 2": {1: 1}}), "2 of gloo"),
        (lambda: plot_sizes({"a": {}}), "the curve 'a' has no values"),
        (lambda: plot_sizes({"a": {0: 1.0}}), "a size of 'a' is 0; .* above 0"),
        (lambda: plot_sizes({"a": {2048: 0}}), "time of 'a' at 2 KiB is 0; .* above 0"),
        (lambda: plot_sizes(CURVES, {"memory": -1}), "memory is -1; .* above 0"),
        (lambda: plot_sizes(CURVES, busbw_factor=0), "busbw_factor is 0; .* above 0"),
        (lambda: plot_fit([1, 2], [1], abs), "2 sizes, 1 times"),
        (lambda: plot_fit([], [], abs), "0 sizes, 0 times"),
        (lambda: plot_fit([1], [float("nan")], abs), "the time of 1 B is nan"),
        (lambda: plot_bytes({}, {}), "at least one"),
        (lambda: plot_bytes({"a": [1]}, {"b": [1]}), r"measured are \['a'\]"),
        (lambda: plot_bytes({"a": [1]}, {"a": [1, 2]}), "'a' has 1 measured"),
    ],
)
def test_what_cannot_be_drawn(bad, says):
    with pytest.raises(ValueError, match=says):
        bad()
