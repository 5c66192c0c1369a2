"""A chapter is a notebook, one folder, its tests, a row of the README: all is found."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from ddp_course import chapters
from ddp_course.launch.server import IN_SERVER

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
    for room in chapters.rooms():
        exercises = importlib.import_module(f"ddp_course.chapters.{room}.exercises")
        assert any(isinstance(e, chapters.Exercise) for e in vars(exercises).values())
        assert any(name.startswith(f"{room[2:4]}_") for name in chapters.images()), room


# A new chapter, in a copy of the course

CELLS = [
    new_markdown_cell(
        "# 99 What does a new chapter need? One folder and this page.\n\n"
        "**Time:** 1 minutes to read."
    ),
    new_code_cell(
        "from ddp_course.chapters.ch99_toy.exercises import check_twice\n\n"
        "check_twice(lambda number: number + number)"
    ),
    new_markdown_cell("The picture of this chapter is a lonely square, with a name."),
    new_code_cell(
        "from ddp_course.chapters.ch99_toy.figures import square\n\nsquare(40).title"
    ),
]
TOY = {
    "ddp_course/chapters/ch99_toy/__init__.py": '"""Chapter 99: what is needed?"""\n',
    "ddp_course/chapters/ch99_toy/exercises.py": '''\
"""The exercise of chapter 99."""

from ddp_course.chapters.ch99_toy import solutions
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import exercise, expect_call


@exercise("twice", solution=solutions.twice)
def check_twice(answer: Answer) -> str:
    """`twice(number)`: the number and once more the number.

    How often is the number in it?

    It is there, and once more: a sum of two.
    """
    expect_call(answer, 3, returns=6, because="3 + 3 is 6")
    expect_call(answer, 2.5, returns=5.0, because="numbers need not be whole")
    return "two numbers, one of them not whole"
''',
    "ddp_course/chapters/ch99_toy/solutions.py": '''\
"""A solution of chapter 99's exercise."""


def twice(number):
    """Add it to itself."""
    return number + number
''',
    "ddp_course/chapters/ch99_toy/figures.py": '''\
"""The figure of chapter 99."""

from functools import partial

from ddp_course.lab import Drawing


def square(side: int) -> Drawing:
    """Draw a square of `side` pixels."""
    d = Drawing(side, side, title="A square")
    d.rect(2, 2, side - 4, side - 4)
    return d


IMAGES = {"99_square.svg": partial(square, 60)}
''',
    "tests/chapters/ch99_toy/answers.py": '''\
"""Answers to the exercise of chapter 99."""


def square(number):
    return number * number


def whole(number):
    return 2 * int(number)


def nothing(number):
    return None


def shifted(number):
    return 2 * number


ANSWERS = {
    "twice": {
        shifted: "",
        square: "because 3 + 3 is 6",
        whole: "need not be whole",
        nothing: "`None`",
    },
}
''',
}
ROW = "| 99 | [toy](notebooks/99_toy.ipynb) | What does a new chapter need? |"


@pytest.fixture
def copy(tmp_path):
    """The tree that git knows, in another folder, and one chapter more."""
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    listing = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    for file in filter(lambda file: (ROOT / file).is_file(), listing.stdout.split()):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    for file, text in TOY.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    notebook = tmp_path / "notebooks/99_toy.ipynb"
    nbformat.write(new_notebook(cells=CELLS), notebook)
    readme = (tmp_path / "README.md").read_text()
    (last,) = re.findall(
        rf"^\| {max(chapters.rooms())[2:4]} \|.*", readme, re.MULTILINE
    )
    (tmp_path / "README.md").write_text(readme.replace(last, f"{last}\n{ROW}"))
    return tmp_path


def run(folder: Path, *command: str) -> str:
    """Run `python ...` on the copy, which needs no ranks; return what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), IN_SERVER: "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.kernel
def test_a_toy_chapter_is_found_everywhere(copy):
    assert faults(copy) == []
    assert "images/99_square.svg" in run(copy, "-m", "ddp_course.chapters")
    stored = run(copy, "-m", "ddp_course.cli", "notebooks", "--save", "99")
    assert "99_toy: stored" in stored
    assert "✓ **twice: passed.**" in (copy / "notebooks/99_toy.ipynb").read_text()
    tests = ["exercises", "right_answers", "wrong_answers", "figures"]
    tests = [f"chapters/test_{name}.py" for name in tests]
    tests += ["test_repository.py", "test_architecture.py", "chapters/test_rooms.py"]
    chosen = "[twice or up_to_date or readme or 99 or floor_imports"
    chosen += " or toy.ipynb or formatted"
    told = run(
        copy,
        *("-m", "pytest", "-n", "0", "-v", "-k", f"({chosen}) and not everywhere"),
        *(f"tests/{file}" for file in tests),
        "notebooks/99_toy.ipynb",
    )
    for seen in (
        "test_the_solution_passes[twice]",
        "test_an_untouched_stub_is_not_attempted_yet[twice]",
        "test_the_solution_is_shown[twice]",
        "test_two_hints_come_before_the_solution[twice]",
        "test_a_right_answer_in_another_style_passes[twice-shifted]",
        "test_a_wrong_answer_gets_its_hint[twice-whole]",
        "test_images_are_up_to_date",
        "test_notebooks_keep_the_house_rules[99_toy.ipynb]",
        "test_readme_lists_every_chapter_and_no_other",
        "test_a_floor_imports_only_from_lower_floors",
        "99_toy::ipynb::Cell 1",
    ):
        assert re.search(re.escape(seen) + " PASSED", told), (seen, told[-9000:])


def test_a_chapter_that_is_not_whole_is_named(copy):
    for file in (*TOY, "notebooks/99_toy.ipynb"):
        text = (copy / file).read_text()
        (copy / file).unlink()
        (told,) = faults(copy)
        assert told == f"ch99_toy has no {file}"
        (copy / file).write_text(text)
