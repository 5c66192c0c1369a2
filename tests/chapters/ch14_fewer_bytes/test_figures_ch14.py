"""The figures of chapter 14."""

import re

import numpy as np
import pytest
from drawings import check_layout, no_texts_overlap, words

from ddp_course.chapters.ch14_fewer_bytes.figures import (
    LARGE,
    bars,
    bytes_sent,
    drift,
    over_links,
    what_travels,
    worth,
)
from ddp_course.lab.palette import INK, rank_color

SHARES = {"16 bits": 0.5, "top-k": 4.0, "gathered": 1234.5}
SENT = {"DDP": 6e6, "top-k": 2e5, "local": 7.5e5}
CURVES = {
    name: [(sent, 4.0), (9 * sent, 3.0), (20 * sent, loss)]
    for (name, sent), loss in zip(SENT.items(), (2.3, 2.5, 2.31), strict=True)
}
LOSSES = {"DDP": (2.3, 2.4, 2.9), "top-k": (2.5, 2.5, 2.51), "local": (2.3, 2.3, 2.3)}


def test_what_travels():
    check_layout(what_travels)
    assert {"top-k", "two thin matrices", "travels", "stays"} <= set(
        words(what_travels())
    )
    assert what_travels().svg().count(f'fill="{INK}"') > 3 * 48 + len(LARGE)


def test_bars():
    check_layout(lambda: bars(SHARES, "four ranks"))
    told = bars(SHARES, "four ranks")
    assert {"0.5", "4", "1234", "what DDP sends"} <= set(words(told))
    drawn = bars({"half": 0.5, "top-k": 2.6, "sign": 4.0}, "256 ranks").svg()
    wide = [float(w) for w in re.findall(r'width="([\d.]+)" height="18"', drawn)]
    assert [w / wide[0] for w in wide] == pytest.approx([1, 5.2, 8])  # none is cut


def test_what_is_sent():
    check_layout(lambda: bytes_sent(256, 0.05, 1, 32))
    four, many = words(bytes_sent(4)), words(bytes_sent(256, 0.05))
    assert four[four.index("topk:0.01") + 1] == "0.04"
    assert many[many.index("topk:0.05") + 1] == "13"  # density x ranks
    assert many[many.index("local, H = 8") + 1] == "0.12"


def test_drift():
    (axes,) = drift([[0.1, 0.2], [0.3, 0.4], [0.1, 0.1], [0.2, 0.5]], 2).axes
    ranks = [line for line in axes.lines if len(line.get_xdata()) == 4]
    assert [line.get_color() for line in ranks] == [rank_color(0), rank_color(1)]
    assert list(ranks[1].get_ydata()) == [0.2, 0.4, 0.1, 0.5]
    averages = [line.get_xdata()[0] for line in axes.lines if line not in ranks]
    assert averages == [2.5, 4.5]


def test_what_it_is_worth():
    no_texts_overlap(lambda: worth(CURVES, "DDP"))
    (axes,) = worth(CURVES, "DDP").axes
    drawn = sorted([(1e6 * x, y) for x, y in line.get_xydata()]
                   for line in axes.lines[1:])  # fmt: skip
    assert np.allclose(drawn, sorted(CURVES.values()))
    assert {text.get_text() for text in axes.texts} == set(CURVES)


def test_over_links():
    no_texts_overlap(lambda: over_links(LOSSES, ["fast", "slow", "slower"], "DDP"))
    (axes,) = over_links(LOSSES, ["fast", "slow", "slower"], "DDP").axes
    drawn = sorted(tuple(map(float, line.get_ydata())) for line in axes.lines)
    assert drawn == sorted(LOSSES.values())
    assert max(line.get_linewidth() for line in axes.lines) == 6
