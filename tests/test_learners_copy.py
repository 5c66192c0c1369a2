"""The learner's copy: what is new arrives, and what a learner wrote stays."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from ipykernel.ipkernel import IPythonKernel
from links import dead_links
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell, new_notebook, new_output

from ddp_course import learners_copy
from ddp_course.cli import main
from ddp_course.commands import CommandError, chapters, copy

ROOT = Path(__file__).parents[1]
NAMES = ("00_start_here", "01_ranks")
STUB = r"^def (\w+)\([^:]*:\n    raise NotImplementedError"
ROOM = "ddp_course.chapters.ch00_start_here"


def write(folder, name, source, output=""):
    """Write a notebook of one cell."""
    printed = [new_output("stream", text=output)] if output else []
    cells = [new_code_cell(source, id="a", outputs=printed)]
    (folder / "notebooks").mkdir(parents=True, exist_ok=True)
    nbformat.write(new_notebook(cells=cells), folder / f"notebooks/{name}.ipynb")


def source(folder, name):
    (cell,) = nbformat.read(folder / f"notebooks/{name}.ipynb", as_version=4).cells
    return cell.source


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of two chapters, and a learner who stands beside it."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    folder, home = tmp_path / "course", tmp_path / "home"
    for name in NAMES:
        write(folder, name, f"{name} = 1")
    (folder / "images").mkdir()
    (folder / "images/map.svg").write_text("<svg/>")
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr(learners_copy, "PACKAGE", folder / "ddp_course")
    return folder


def run(*words, cwd=ROOT):
    """Run a program that must succeed; return what it prints."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_copy_is_whole_and_its_figures_are_trusted(course):
    mine, results = copy.learners_copy(None)
    assert mine == Path.cwd() / "ddp-course"
    assert results == [f"Your copy of the course: {mine}"]
    record = {learners_copy.RECORD: (mine / learners_copy.RECORD).read_bytes()}
    assert files(mine).keys() == files(course).keys() | record.keys()
    for name in files(course):
        assert copy.digest_of(mine / name) == copy.digest_of(course / name)
    notebook = nbformat.read(mine / "notebooks/01_ranks.ipynb", as_version=4)
    assert NotebookNotary().check_signature(notebook)
    assert copy.learners_copy(None) == (mine, results)  # nothing is new


def test_a_copy_says_of_python_what_a_kernel_says(course):
    """Or JupyterLab asks about changes that nobody has made."""
    mine, _ = copy.learners_copy(None)
    for folder, same in ((mine, True), (course, False)):
        notebook = nbformat.read(folder / "notebooks/01_ranks.ipynb", as_version=4)
        results = notebook.metadata.get("language_info", {})
        assert (results == IPythonKernel.language_info) == same


def test_every_link_of_a_copy_leads_somewhere(course, tmp_path):
    """In the whole course, README and pictures included; and a lost file is seen."""
    copy.refresh(ROOT, tmp_path / "mine")
    assert dead_links(tmp_path / "mine") == []
    (tmp_path / "mine/README.md").unlink()
    assert len(dead_links(tmp_path / "mine")) >= 16


def test_lab_opens_where_the_learner_left_off(course, monkeypatch):
    write(course, "02_collectives", "02")
    chapter = {"00_start_here": ["a"], "01_ranks": ["b"], "02_collectives": ["c"]}
    monkeypatch.setattr(learners_copy, "exercises", lambda: chapter)
    mine, _ = copy.learners_copy(None)
    assert copy.left_off(mine).stem == "00_start_here"
    (mine / learners_copy.FILE).write_text('["a", "passed"]\n["b", "not yet"]')
    assert copy.left_off(mine).stem == "01_ranks"
    saved = mine / "notebooks/02_collectives.ipynb"
    write(mine, saved.stem, "02", "run by the learner")
    os.utime(saved, (2**31, 2**31))
    assert copy.left_off(mine) == saved
    copy.learners_copy(None)  # nothing is new
    assert copy.left_off(mine) == saved
    done = "\n".join(f'["{name}", "passed"]' for name in "abc")
    (mine / learners_copy.FILE).write_text(done)
    os.utime(saved, (0, 0))
    assert copy.left_off(mine).stem == "00_start_here"


def test_one_who_stands_in_a_copy_goes_on_with_it(course, monkeypatch):
    mine, _ = copy.learners_copy("my course")
    monkeypatch.chdir(mine / "notebooks")
    assert copy.learners_copy(None)[0] == mine
    assert chapters.course() == course
    assert chapters.folder() == mine / "notebooks"  # `ddp-course run 00` runs theirs


def test_what_is_new_comes_and_what_the_learner_wrote_stays(course):
    mine, _ = copy.learners_copy(None)
    write(mine, "00_start_here", "answer = 42", "42")  # the learner's
    write(mine, "01_ranks", "01_ranks = 1", "run by the learner")  # outputs alone
    theirs = files(mine)["notebooks/00_start_here.ipynb"]
    ran = files(mine)["notebooks/01_ranks.ipynb"]

    assert copy.refresh(course, mine) == []  # the course has not changed
    assert files(mine)["notebooks/01_ranks.ipynb"] == ran

    for name in NAMES:
        write(course, name, f"{name} = 2")
    (course / "images/map.svg").write_text("<svg></svg>")
    results = copy.refresh(course, mine)
    assert results == [
        "images/map.svg is new",
        "notebooks/00_start_here.ipynb has your changes; the new one is "
        "00_start_here.new.ipynb",
        "notebooks/01_ranks.ipynb is new",
    ]
    assert files(mine)["notebooks/00_start_here.ipynb"] == theirs
    assert source(mine, "00_start_here.new") == "00_start_here = 2"
    assert source(mine, "01_ranks") == "01_ranks = 2"
    assert copy.refresh(course, mine) == []  # told once

    (mine / "notebooks/00_start_here.ipynb").unlink()  # to have it anew
    copy.refresh(course, mine)
    assert source(mine, "00_start_here") == "00_start_here = 2"


def test_a_learner_may_break_a_notebook(course):
    mine, _ = copy.learners_copy(None)
    for text in ("", "{}", '{"cells": [1]}', "\x00"):
        (mine / "notebooks/01_ranks.ipynb").write_text(text)
        assert copy.refresh(course, mine) == []
        assert (mine / "notebooks/01_ranks.ipynb").read_text() == text


@pytest.mark.parametrize("wrong", ["outputs count", "always newer", "never newer"])
def test_planted_copies_that_lose_something_are_caught(course, monkeypatch, wrong):
    original = copy.digest_of
    planted = {
        "outputs count": lambda path: str(hash(path.read_bytes())),
        "always newer": lambda path: original(path) if course in path.parents else "",
        "never newer": lambda path: path.name,
    }
    monkeypatch.setattr(copy, "digest_of", planted[wrong])
    with pytest.raises(AssertionError):
        test_what_is_new_comes_and_what_the_learner_wrote_stays(course)


def test_a_folder_that_is_something_else_is_left_alone(course):
    (Path.cwd() / "ddp-course").mkdir()
    (Path.cwd() / "ddp-course/letter.txt").write_text("dear")
    with pytest.raises(CommandError, match="not a copy that .* name another folder"):
        copy.learners_copy(None)
    assert list(files(Path.cwd())) == ["ddp-course/letter.txt"]
    with pytest.raises(CommandError, match="cannot write your copy"):
        copy.learners_copy("ddp-course/letter.txt/x")


@pytest.mark.timeout(900)
def test_a_clone_stays_clean(course, capsys, monkeypatch):
    """The course is done in the copy, and git has nothing to say in the clone."""

    git = partial(run, "git", cwd=course)
    shutil.copy(ROOT / ".gitignore", course)
    git("init", "-q")
    git("add", ".")
    assert "00_start_here" in git("status", "--short")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all")
    monkeypatch.chdir(course)
    mine, _ = copy.learners_copy(None)
    solved = [f"from {ROOM}.{file} import *" for file in ("exercises", "solutions")]
    write(mine, "01_ranks", "\n".join([*solved, "check_my_slice(my_slice)"]), "yes")
    assert main(["run", str(mine / "notebooks/01_ranks.ipynb")]) == 0, capsys
    assert learners_copy.reached(mine) == {"my_slice": "passed"}
    assert git("status", "--short") == ""
    write(course, "00_start_here", "x")  # git would have told
    assert "00_start_here" in git("status", "--short")


@pytest.mark.endurance
@pytest.mark.kernel
@pytest.mark.skipif("DDP_COURSE_ENDURANCE" not in os.environ, reason="minutes")
@pytest.mark.timeout(3000)
def test_the_whole_course_is_done_and_the_clone_stays_clean(tmp_path, monkeypatch):
    """As the test above, with all chapters themselves and every exercise solved."""
    clone = tmp_path / "clone"
    run("git", "clone", "-q", str(ROOT), str(clone))
    monkeypatch.chdir(clone)
    mine, _ = copy.learners_copy(None)
    chapters = sorted(path.stem for path in mine.glob("notebooks/*.ipynb"))
    assert len(chapters) == len(learners_copy.exercises())
    for chapter in chapters:
        file = mine / f"notebooks/{chapter}.ipynb"
        notebook = nbformat.read(file, as_version=4)
        for cell in notebook.cells:
            if stub := re.search(STUB, cell.source, re.MULTILINE):
                room = f"ddp_course.chapters.ch{chapter}.solutions"
                kept = cell.source[: stub.start()], cell.source.splitlines()[-1]
                cell.source = f"{kept[0]}from {room} import {stub[1]}\n\n{kept[1]}"
        nbformat.write(notebook, file)
        assert main(["run", str(file)]) == 0
        done = learners_copy.reached(mine)
        names = learners_copy.exercises()[chapter]
        assert [done.get(name) for name in names] == ["passed"] * len(names)
    assert run("git", "status", "--short", cwd=clone) == ""


def test_a_wheel_brings_notebooks_and_pictures(tmp_path, monkeypatch):
    """No clone is needed: what pip installs has all that `lab` copies."""
    pytest.importorskip("setuptools", "77", reason="pip brings it when it builds")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    listed = run("git", "ls-files", "-co", "--exclude-standard").split()
    for file in filter(lambda file: (ROOT / file).is_file(), listed):
        (tmp_path / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / "tree" / file)
    build = "from setuptools.build_meta import build_wheel as b; print(b('.'))"
    run(sys.executable, "-c", build, cwd=tmp_path / "tree")
    (wheel,) = (tmp_path / "tree").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for file in listed:
        if file.startswith(("notebooks/", "images/")):
            assert any(name.endswith(f"share/ddp-course/{file}") for name in names)
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (installed,) = (tmp_path / "installed").glob("*.data/data/share/ddp-course")
    copy.refresh(installed, tmp_path / "mine")
    assert dead_links(tmp_path / "mine") == []
    assert not [name for name in names if name.startswith("tests/")]


def test_the_notebooks_of_a_wheel_are_found(course, tmp_path, monkeypatch):
    file = course / "notebooks/00_start_here.ipynb"
    installed = SimpleNamespace(name=file.name, locate=lambda: file)
    monkeypatch.setattr(learners_copy.metadata, "files", lambda _: [installed])
    monkeypatch.setattr(learners_copy, "PACKAGE", tmp_path / "site-packages/ddp_course")
    assert chapters.course() == course
    monkeypatch.setattr(learners_copy.metadata, "files", lambda _: None)
    with pytest.raises(CommandError, match="run this in a clone"):
        chapters.course()


def test_a_copy_that_was_interrupted_goes_on(course):
    mine, results = copy.learners_copy(None)
    write(mine, "00_start_here", "answer = 42")
    (mine / "notebooks/01_ranks.ipynb").unlink()
    (mine / learners_copy.RECORD).write_text("{")
    assert len(copy.learners_copy(None)[1]) == 2
    assert source(mine, "00_start_here") == "answer = 42"
    assert source(mine, "01_ranks") == "01_ranks = 1"
