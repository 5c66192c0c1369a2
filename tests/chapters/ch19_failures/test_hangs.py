"""Four planted hangs: the tools name the rank that was planted, wherever it is."""

import contextlib
import functools
import importlib
import io
import sys

import pytest

from ddp_course.chapters.ch19_failures.hangs import HANGS, examine_all
from ddp_course.chapters.ch19_failures.solutions import my_diagnosis
from ddp_course.launch import spawn


@functools.cache
def examined(odd):
    """Examine all hangs; again, longer, if a rank was too slow to come to its hang."""
    for timeout in (3.0, 10.0):
        with contextlib.suppress(FileNotFoundError, LookupError, ValueError):
            found = examine_all(odd, timeout)
            diagnoses = [
                my_diagnosis(each.calls, each.where) for each in found.values()
            ]
            if diagnoses == [(hang.__name__, odd) for hang in HANGS]:
                return found
    return examine_all(odd, timeout=30.0)


@pytest.mark.parametrize("odd", [0, 3])
def test_each_hang_is_found_on_the_rank_on_which_it_was_planted(odd):
    found = examined(odd)
    assert [*found] == [hang.__name__ for hang in HANGS]
    for name, each in found.items():
        assert my_diagnosis(each.calls, each.where) == (name, odd)
    others = {(odd + 1) % 4, (odd + 2) % 4}
    behind = f"missing ranks: {{{odd}}}"
    mutual = sorted([behind, f"missing ranks: {others}"])
    assert found["order"].analysis == mutual
    assert found["stuck"].analysis == found["left"].analysis == [behind]
    assert found["skipped"].analysis == ["COLLECTIVE_TYPE_MISMATCH"]


def test_the_report_shows_the_line_of_each_rank():
    found = examined(3)
    lines = [
        (report.where or "").partition(": ")[2] for report in found["stuck"].reports
    ]
    assert lines[3] == "batch = batches.get()"
    assert {*lines[:3]} == {"dist.all_reduce(batch)"}
    assert found["left"].reports[3].status == "ok"


def test_the_import_prints_nothing_without_tabulate():
    """PyTorch's module says that it is missing: in a cell, where that is an output."""

    def imports():  # in a process that has not imported it
        name = "ddp_course.chapters.ch19_failures.hangs"
        assert name not in sys.modules
        sys.modules["tabulate"] = None
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            importlib.import_module(name)
        return said.getvalue()

    assert spawn(imports, world_size=1, output="none") == [""]
