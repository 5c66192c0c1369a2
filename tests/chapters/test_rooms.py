"""A chapter is a notebook, one folder, its tests, a row of the README: all is found.

`tests/test_recipes.py` adds a chapter to a copy of the course.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from ddp_course import chapters

ROOT = Path(__file__).parents[2]
FILES = ("__init__.py", "exercises.py", "solutions.py", "figures.py")


def faults(root: Path) -> list[str]:
    """Return what is missing from the chapters of the tree at `root`, by name."""
    found = []
    notebooks = {f"ch{path.stem}" for path in root.glob("notebooks/[0-9]*.ipynb")}
    folders = {path.name for path in root.glob("ddp_course/chapters/ch*")}
    for room in sorted(notebooks | folders):
        if room not in notebooks:
            found.append(f"{room} has no notebooks/{room[2:]}.ipynb")
        wanted = [f"ddp_course/chapters/{room}/{file}" for file in FILES]
        for file in (*wanted, f"tests/chapters/{room}/answers.py"):
            if not (root / file).is_file():
                found.append(f"{room} has no {file}")
    return found


def test_every_chapter_is_whole():
    assert faults(ROOT) == []


def test_every_room_has_exercises_and_draws_images_of_its_own():
    for room in sorted({*chapters.rooms()}):
        exercises = importlib.import_module(f"ddp_course.chapters.{room}.exercises")
        assert any(isinstance(e, chapters.Exercise) for e in vars(exercises).values())
        assert any(name.startswith(f"{room[2:4]}_") for name in chapters.images()), room


def test_a_chapter_that_is_not_whole_is_named(tmp_path):
    wanted = [f"ddp_course/chapters/ch99_toy/{file}" for file in FILES]
    wanted += ["tests/chapters/ch99_toy/answers.py", "notebooks/99_toy.ipynb"]
    for file in wanted:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert faults(tmp_path) == []
    for file in wanted:
        (tmp_path / file).unlink()
        assert faults(tmp_path) == [f"ch99_toy has no {file}"]
        (tmp_path / file).touch()
