"""The figures of chapter 14."""

import re

import pytest
from drawings import check_layout, no_texts_overlap, words

from ddp_course.chapters.ch14_fewer_bytes.figures import (
    LARGE,
    bytes_sent,
    drift,
    over_time,
    what_travels,
    worth,
)
from ddp_course.lab.palette import INK, rank_color

SENT = {"DDP": 6e6, "top-k": 2e5, "local": 7.5e5}
CURVES = {
    name: [(sent, 4.0), (9 * sent, 3.0), (20 * sent, loss)]
    for (name, sent), loss in zip(SENT.items(), (2.3, 2.5, 2.31), strict=True)
}


def test_what_travels():
    check_layout(what_travels)
    assert {"top-k", "two thin matrices", "travels", "stays"} <= set(
        words(what_travels())
    )
    assert what_travels().svg().count(f'fill="{INK}"') > 3 * 48 + len(LARGE)


def test_what_is_sent():
    check_layout(lambda: bytes_sent(256, 0.05, 1, 32))
    check_layout(bytes_sent)
    four, many = words(bytes_sent(4)), words(bytes_sent(256, 0.05))
    assert {"0.5", "what DDP sends"} <= set(four)
    assert four[four.index("topk:0.01") + 1] == "0.04"
    assert many[many.index("topk:0.05") + 1] == "13"  # density x ranks
    assert many[many.index("local, H = 8") + 1] == "0.12"
    assert "128" in words(bytes_sent(256, 0.5))
    wide = re.findall(r'width="([\d.]+)" height="18"', bytes_sent(256).svg())
    half, _, sign, topk, *_, local = map(float, wide)  # none is cut
    assert [sign / half, topk / half, local / half] == pytest.approx(
        [8, 5.12, 0.25], 0.01
    )


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
    assert [[*map(tuple, line.get_xydata())] for line in axes.lines] == [
        *CURVES.values()
    ]
    assert {text.get_text() for text in axes.texts} == set(CURVES)


def test_over_time():
    links = {
        link: {n: [(x * slow, y) for x, y in curve] for n, curve in CURVES.items()}
        for link, slow in {"fast": 1e-6, "slow": 2e-6}.items()
    }
    no_texts_overlap(lambda: over_time(links, "DDP"))
    for axes, curves in zip(over_time(links, "DDP").axes, links.values(), strict=True):
        drawn = [[*map(tuple, line.get_xydata())] for line in axes.lines]
        assert drawn == [*curves.values()]
        assert axes.lines[0].get_linewidth() == 5 > axes.lines[1].get_linewidth()
        named = sorted(axes.texts, key=lambda text: text.get_position()[1])
        assert [text.get_text() for text in named] == ["DDP", "local", "top-k"]
        assert all(text.xy == curves[text.get_text()][-1] for text in named)
