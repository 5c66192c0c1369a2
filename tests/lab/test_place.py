"""A notebook that was moved says what it misses; one in its place says nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_course.lab import place

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def test_in_its_place_a_notebook_misses_nothing():
    assert place.missing(NOTEBOOKS) == ""


@pytest.mark.parametrize(
    ("present", "lost"),
    [
        ([], "its pictures and the pages that it links to are not here. "),
        (["images/course_map.svg"], ", the pages that it links to are not here. "),
        (["notebooks/glossary.md"], ", its pictures are not here. "),
    ],
)
def test_elsewhere_it_says_what_and_where_it_is(tmp_path, monkeypatch, present, lost):
    monkeypatch.chdir(tmp_path)
    for file in present:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    results = place.missing(tmp_path / "notebooks")
    assert lost in results
    assert f"They are in `{NOTEBOOKS.parent}`. `ddp-course lab` opens" in results


def test_where_no_course_is_known_it_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr(place.learners_copy, "course", lambda: None)
    assert place.missing(tmp_path).endswith(
        "are not here. `ddp-course lab` opens a complete copy of the course."
    )


@pytest.mark.parametrize(("kernel", "times"), [(True, 1), (False, 0)])
def test_it_is_said_in_a_kernel_only(tmp_path, monkeypatch, kernel, times):
    shown = []
    shell = SimpleNamespace(kernel="one") if kernel else None
    monkeypatch.setattr(place, "get_ipython", lambda: shell)
    monkeypatch.setattr(place, "display", shown.append)
    monkeypatch.chdir(tmp_path)
    place.say_what_is_missing()
    assert len(shown) == times
    monkeypatch.chdir(NOTEBOOKS)
    place.say_what_is_missing()
    assert len(shown) == times
