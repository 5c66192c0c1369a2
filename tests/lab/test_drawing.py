"""The SVG writer: the same bytes everywhere, valid, readable, and strict."""

import math
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_course.lab.draw.drawing import Drawing, number
from ddp_course.lab.palette import (
    RANK_COLORS,
    contrast,
    darker,
    lighter,
    rank_color,
    text_color,
)

SVG = "{http://www.w3.org/2000/svg}"


class Images(HTMLParser):
    """Reads the attributes of all images of a page."""

    def __init__(self):
        super().__init__()
        self.images = []

    def handle_starttag(self, tag, attrs):
        assert tag == "img"
        self.images.append(dict(attrs))


def parse(drawing):
    return ElementTree.fromstring(drawing.svg())


def test_a_whole_drawing_byte_by_byte():
    d = Drawing(60, 40.5, title="a < b", description='"&"')
    d.rect(1, 2, 3.14159, 4, radius=2, dashed=True)
    d.line((0, 0), (1 / 3, -0.001))
    with d.shifted(5, 6):
        d.text(7, 8, "<&>", bold=True)
    assert d.svg() == (
        '<svg xmlns="http://www.w3.org/2000/svg" width="60" height="40.5" '
        'viewBox="0 0 60 40.5" role="img" font-family="sans-serif">\n'
        "<title>a &lt; b</title>\n"
        '<desc>"&amp;"</desc>\n'
        '<rect x="0" y="0" width="60" height="40.5" fill="#FFFFFF" stroke="none"/>\n'
        '<rect x="1" y="2" width="3.14" height="4" rx="2" fill="none" '
        'stroke="#222222" stroke-dasharray="5 4"/>\n'
        '<polyline points="0,0 0.33,0" fill="none" stroke="#222222"/>\n'
        '<g transform="translate(5 6)">\n'
        '<text x="7" y="8" font-size="13" text-anchor="middle" font-weight="bold" '
        'fill="#222222">&lt;&amp;&gt;</text>\n'
        "</g>\n"
        "</svg>\n"
    )


@given(st.floats(-1e6, 1e6))
def test_a_number_is_short_and_close(value):
    text = number(value)
    assert abs(float(text) - value) <= 0.005 + 1e-9
    assert text != "-0"
    assert len(text.partition(".")[2]) <= 2
    assert not ("." in text and text.endswith("0"))
    assert "e" not in text


def test_numbers():
    written = [number(v) for v in (0, -0.0, -0.004, 1.0, 100, 2.5, 2.556, -3.10)]
    assert written == ["0", "0", "0", "1", "100", "2.5", "2.56", "-3.1"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_coordinate(value):
    with pytest.raises(ValueError, match="a coordinate is"):
        Drawing(10, 10, title="t").rect(value, 0, 1, 1)


@pytest.mark.parametrize("size", [(0, 10), (10, -1), (math.nan, 10), (math.inf, 10)])
def test_a_drawing_has_a_size(size):
    with pytest.raises(ValueError, match="both must be above 0"):
        Drawing(*size, title="t")


def test_a_drawing_has_a_title():
    with pytest.raises(ValueError, match="needs a title"):
        Drawing(10, 10, title="")


def test_a_notebook_shows_it():
    d = Drawing(10, 10, title="ten by ten", description='"&<\n')
    d.text(1, 2, "100 % of #1's → ü")
    read = Images()
    read.feed(d._repr_html_())
    (shown,) = read.images
    assert shown["alt"] == 'ten by ten. "&<\n'
    assert shown["style"] == "max-width:100%;height:auto"
    scheme, _, data = shown["src"].replace("\n", "").partition(",")  # as browsers do
    assert scheme == "data:image/svg+xml"
    assert unquote(data) == d.svg().replace("\n", "")
    assert "#" not in data and data.isascii()
    assert repr(d) == "<Drawing: ten by ten>"  # no address: nbval compares it


def test_saved_as_drawn(tmp_path):
    d = Drawing(10, 10, title="ü × →")
    d.save(tmp_path / "d.svg")
    assert (tmp_path / "d.svg").read_bytes() == d.svg().encode()


def test_no_ids():
    d = Drawing(100, 100, title="t")
    d.hatch(0, 0, 50, 20)
    d.arrow((0, 0), (50, 50), both=True)
    assert " id=" not in d.svg()
    assert "url(" not in d.svg()


def test_hatching_stays_inside_and_fills():
    d = Drawing(100, 100, title="t")
    d.hatch(10, 20, 33, 14)
    path = parse(d).find(f"{SVG}path").get("d")
    points = [
        tuple(map(float, point.split()))
        for point in path.replace("M", "L").split("L")
        if point
    ]
    assert len(points) > 12
    assert all(10 <= x <= 43 and 20 <= y <= 34 for x, y in points)
    for (x1, y1), (x2, y2) in zip(points[::2], points[1::2], strict=True):
        assert x2 - x1 == pytest.approx(y2 - y1)
        assert x2 > x1


def test_the_tip_of_an_arrow():
    d = Drawing(100, 100, title="t")
    d.arrow((10, 50), (90, 50))
    (head,) = parse(d).findall(f"{SVG}polygon")
    assert head.get("points").startswith("90,50 ")
    line = parse(d).find(f"{SVG}polyline").get("points")
    assert line.startswith("10,50 ")
    assert float(line.split()[1].split(",")[0]) < 90  # ends inside the head


def test_an_arrow_shorter_than_its_head():
    with pytest.raises(ValueError, match="shorter than its head"):
        Drawing(100, 100, title="t").arrow((0, 0), (0, 3))


def test_a_block_has_a_dark_edge_and_a_readable_name():
    for color in RANK_COLORS:
        d = Drawing(100, 100, title="t")
        d.block(0, 0, 50, 20, "name", fill=color)
        rect = parse(d).findall(f"{SVG}rect")[1]
        assert rect.get("stroke") == darker(color)
        assert parse(d).find(f"{SVG}text").get("fill") == text_color(color)


def test_a_drawing_in_a_drawing():
    inner = Drawing(10, 10, title="inner")
    inner.text(1, 2, "x")
    outer = Drawing(50, 50, title="outer")
    outer.place(inner, 20, 30)
    group = parse(outer).find(f"{SVG}g")
    assert group.get("transform") == "translate(20 30)"
    assert group.find(f"{SVG}text").text == "x"


@pytest.mark.parametrize("color", [*RANK_COLORS, *map(lighter, RANK_COLORS), "#FFFFFF"])
def test_text_is_readable_on_every_fill(color):
    assert contrast(text_color(color), color) >= 4.5  # WCAG 2.1, level AA
    assert contrast(darker(color), "#FFFFFF") >= contrast(color, "#FFFFFF")


def test_contrast():
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#767676", "#FFFFFF") == pytest.approx(4.54, abs=0.01)


def test_the_colours_of_the_house():
    assert RANK_COLORS == (
        "#0072B2", "#E69F00", "#009E73", "#CC79A7",
        "#56B4E9", "#D55E00", "#000000", "#F0E442",
    )  # fmt: skip
    assert rank_color(9) == rank_color(1) == "#E69F00"
