"""How far a learner is: noted in their copy alone, and never in a cell's way."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from ddp_course import learners_copy as progress
from ddp_course.chapters import all_exercises
from ddp_course.cli import main
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.progress import note

PASSED, NOT_YET, UNTOUCHED = progress.STATUSES[::-1]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A learner's copy, in whose notebooks we stand."""
    (tmp_path / "copy/notebooks").mkdir(parents=True)
    (tmp_path / "copy" / progress.RECORD).write_text("{}")
    monkeypatch.chdir(tmp_path / "copy/notebooks")
    return tmp_path / "copy"


@exercise("swap", solution=lambda x: x)
def check_swap(answer):
    """`swap(x)`: x."""
    expect(answer(1) == 1, hint="It is not.")
    return "one number"


def untouched(x):
    raise NotImplementedError


def test_the_best_that_a_check_has_said_is_noted(copy, capsys):
    for answer, best in (
        (untouched, UNTOUCHED),
        (lambda x: 2, NOT_YET),
        (untouched, NOT_YET),
        (lambda x: x, PASSED),
        (lambda x: 2, PASSED),
    ):
        check_swap(answer)
        assert progress.reached(copy) == {"swap": best}
    assert main(["progress"]) == 0
    output = capsys.readouterr().out
    rows = [line for line in output.splitlines() if line[:2].isdigit()]
    assert len({re.search("[✓✗○·]", row).start() for row in rows}) == 1  # one column
    assert rows[2].split(maxsplit=1)[1] == "✓ swap   · my_broadcast   · my_transpose"
    total = len(all_exercises())
    line = f"1 of {total} exercises have passed. Next: my_slice, in 00_start_here."
    assert line in output


def test_what_passes_says_how_many_have_and_which_is_next(copy):
    total = len(all_exercises())
    assert "exercises" not in check_swap(lambda x: 2).message
    ends = f"Verified: one number. 1 of {total} exercises have passed. Next: my_slice"
    for _ in range(2):  # once more does not count twice
        assert check_swap(lambda x: x).message.startswith(ends)


def test_all_exercises_are_known_without_importing_them():
    by_chapter = progress.exercises()
    assert [name for names in by_chapter.values() for name in names] == [
        *all_exercises()
    ]
    everything = dict.fromkeys(all_exercises(), PASSED)
    assert progress.summary(everything).endswith("All of them!")


def test_nothing_is_noted_in_a_clone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    check_swap(lambda x: x)
    assert list(tmp_path.iterdir()) == []
    assert check_swap(lambda x: x).message == "Verified: one number."
    assert main(["progress"]) == 1
    assert "create one with `ddp-course lab`" in capsys.readouterr().err


@pytest.mark.parametrize("append", [os.O_APPEND, 0])
def test_kernels_that_note_at_the_same_time_lose_nothing(copy, monkeypatch, append):
    monkeypatch.setattr(os, "O_APPEND", append)  # 0 is planted: it overwrites
    kernels = []
    for kernel in range(4):
        kernels.append(os.fork())
        if not kernels[-1]:
            for number in range(50):
                note(f"{kernel}-{number}", PASSED)
            os._exit(0)
    assert [os.waitpid(kernel, 0)[1] for kernel in kernels] == [0] * 4
    assert (len(progress.reached(copy)) == 200) == bool(append)


def half(file: int, line: bytes) -> int:
    """Write as a disk does that is full after a few bytes."""
    return os.pwrite(file, line[:5], os.fstat(file).st_size)


@pytest.mark.parametrize("wrong", ["full", "a folder", "read-only", "gone", "spoilt"])
def test_whatever_goes_wrong_the_cell_goes_on(copy, monkeypatch, wrong):
    file = copy / progress.FILE
    with monkeypatch.context() as patch:
        if wrong == "full":
            patch.setattr("os.write", half)
        elif wrong == "a folder":
            file.mkdir()
        elif wrong == "read-only":
            patch.setattr("os.open", lambda *_: (copy / "not here").stat())
        elif wrong == "gone":
            (copy / "notebooks").rmdir()
        else:
            file.write_bytes(b'["swap"\n[[], 1]\n{}\n\xff\n["swap", "great"]')
        assert check_swap(lambda x: x).status == PASSED
    if wrong in ("full", "spoilt"):  # half a line spoils no other
        note("my_average", NOT_YET)
        found = {"my_average": NOT_YET, "swap": PASSED}
        assert progress.reached(copy).items() <= found.items()
        assert progress.reached(copy)["my_average"] == NOT_YET


def test_a_class_is_counted_without_names(copy, tmp_path, capsys):
    folder = tmp_path / "our class"
    folder.mkdir()
    for answer in (untouched, lambda x: 2, lambda x: x):
        check_swap(answer)
        assert main(["progress", "--report", str(folder)]) == 0
    (folder / "anna.json").write_text('{"exercises": {"swap": "great"}}')
    reports = [file for file in folder.glob("*.json") if file.stem != "anna"]
    assert len(reports) == 3
    for file in reports:
        assert json.loads(file.read_text()).keys() == {"ddp_course", "exercises"}
        assert str(Path.home()) not in file.read_text()
    capsys.readouterr()
    assert main(["progress", "--collect", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line.split() for line in lines if line.startswith("  swap "))
    assert row == ["swap", "1", "1", "1", "0"]
    (row,) = (line.split() for line in lines if line.startswith("  my_slice "))
    assert row == ["my_slice", "0", "0", "0", "3"]
    assert "anna.json: not a report" in lines


def test_no_report_replaces_another(copy, tmp_path, capsys):
    """Neither in a folder that is missing, nor in a file, whatever was typed."""
    check_swap(lambda x: x)
    missing, file = tmp_path / "monday", tmp_path / "monday.json"
    for typed in (f"{missing}", f"{missing}/"):
        assert main(["progress", "--report", typed]) == 1
        assert f"creates it with: mkdir -m 1733 {missing}" in capsys.readouterr().err
    assert not missing.exists()
    assert main(["progress", "--report", str(file)]) == 0
    first = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o644
    check_swap(lambda x: 2)
    assert main(["progress", "--report", str(file)]) == 1
    assert "reports are never overwritten" in capsys.readouterr().err
    assert file.read_text() == first
    missing.write_text("a file")
    assert main(["progress", "--report", str(missing)]) == 1
    assert "name a folder for reports" in capsys.readouterr().err
    assert missing.read_text() == "a file"


def test_a_report_that_fills_the_disk_leaves_nothing(copy, tmp_path, monkeypatch):
    def full(file, text):
        raise OSError(28, "No space left on device")

    check_swap(lambda x: x)
    monkeypatch.setattr("ddp_course.commands.progress.Path.chmod", full)
    assert main(["progress", "--report", str(tmp_path)]) == 1
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--collect", "nowhere"], "there are no reports in nowhere"),
        (["--report", "nowhere/x.json"], "there is no folder"),
        (["--report", "a", "--collect", "b"], "not allowed with"),
    ],
)
def test_what_cannot_be_is_told_in_a_line(copy, capsys, typed, message):
    try:
        assert main(["progress", *typed]) == 1
    except SystemExit as error:
        assert error.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
