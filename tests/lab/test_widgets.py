"""Sliders and galleries draw with the very same function."""

import re

import pytest

from ddp_course.chapters.ch01_ranks.figures import cluster, rendezvous
from ddp_course.lab import Drawing, explore, gallery


def draw(size=3, name="x"):
    if size == 7:
        raise ValueError("seven < eight")
    d = Drawing(10 * size, 10, title=f"{name} {size}")
    d.text(5, 5, name)
    return d


def test_the_first_picture_and_a_move(capsys):
    view = explore(draw, size=(1, 9), name=["x", "y"])
    size, name, picture = view.children
    assert (size.value, size.min, size.max) == (3, 1, 9)  # starts at the default
    assert picture.value == draw(3, "x")._repr_html_()
    size.value = 5
    assert picture.value == draw(5, "x")._repr_html_()
    name.value = "y"
    assert picture.value == draw(5, "y")._repr_html_()
    assert capsys.readouterr() == ("", "")


def test_an_argument_without_a_control_keeps_its_default():
    view = explore(cluster, nnodes=(1, 8), nproc_per_node=(1, 8))
    assert [c.description for c in view.children[:-1]] == ["nnodes", "nproc_per_node"]
    assert view.children[-1].value == cluster(4, 4)._repr_html_()


def test_values_that_do_not_go_together_are_told():
    view = explore(draw, size=(1, 9))
    view.children[0].value = 7
    assert view.children[-1].value == "<p>ValueError: seven &lt; eight</p>"
    view.children[0].value = 8
    assert view.children[-1].value == draw(8)._repr_html_()


def test_an_unknown_argument():
    with pytest.raises(TypeError, match="rendezvous has no argument 'ranks'"):
        explore(rendezvous, ranks=(1, 8))
    with pytest.raises(TypeError, match="nnodes is 4; it must be .lowest, highest."):
        explore(cluster, nnodes=4)


def test_the_notebook_holds_no_picture_and_no_output_widget():
    text = repr(explore(cluster, nnodes=(1, 8), nproc_per_node=(1, 8)))
    assert "svg" not in text
    assert "Output" not in text
    assert text == repr(explore(cluster, nnodes=(1, 8), nproc_per_node=(1, 8)))


def test_a_gallery_is_one_drawing_of_all():
    settings = [{"size": 1}, {"size": 5, "name": "y"}, {"size": 3}]
    whole = gallery(draw, settings)
    assert whole.width == 10 + 24 + 50 + 24 + 30
    assert whole.height == 30 + 10
    moves = re.findall(r"translate\((\S+) (\S+)\)", whole.svg())
    assert moves == [("0", "30"), ("34", "30"), ("108", "30")]
    assert ">size = 5, name = y</text>" in whole.svg()
    for setting in settings:
        for part in draw(**setting)._parts:
            assert part in whole.svg()
    assert whole.svg() == gallery(draw, settings).svg()
    assert "y 5" in whole.description


def test_a_wide_gallery_has_rows():
    whole = gallery(cluster, [{"nnodes": 3, "nproc_per_node": 4}] * 2)
    one = cluster(3, 4)
    assert whole.width == one.width
    assert whole.height == 2 * (one.height + 30)


def test_an_empty_gallery():
    with pytest.raises(ValueError, match="at least one setting"):
        gallery(draw, [])
