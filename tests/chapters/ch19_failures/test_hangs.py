"""Four planted hangs: the tools name the rank that was planted, wherever it is."""

import subprocess
import sys

import pytest

from ddp_course.chapters.ch19_failures.hangs import HANGS, examine_all
from ddp_course.chapters.ch19_failures.solutions import my_diagnosis


@pytest.mark.parametrize("odd", [0, 3])
def test_each_hang_is_found_on_the_rank_on_which_it_was_planted(odd):
    found = examine_all(odd)
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
    found = examine_all(1)
    lines = [
        (report.where or "").partition(": ")[2] for report in found["stuck"].reports
    ]
    assert lines[1] == "batch = batches.get()"
    assert {*lines[:1], *lines[2:]} == {"dist.all_reduce(batch)"}
    assert found["left"].reports[1].status == "ok"


def test_the_import_prints_nothing_without_tabulate():
    """PyTorch's module says that it is missing: in a cell, where that is an output."""
    code = (
        "sys.modules['tabulate'] = None; import ddp_course.chapters.ch19_failures.hangs"
    )
    command = [sys.executable, "-c", f"import sys; {code}"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
