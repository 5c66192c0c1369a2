"""The benches: what they return is what was measured, and the two sides are fair."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from ddp_course import bench
from ddp_course.bench import all_reduce, others
from ddp_course.bench.launch import CASES, SCRIPT, LaunchProcess
from ddp_course.bench.rows import interleaved, row, table
from ddp_course.cli import main
from ddp_course.commands import CommandError

KEYS = ["bench", "case", "metric", "ours", "theirs", "ratio"]


def test_both_sides_are_measured_in_turns_and_neither_always_first():
    turns = []

    def side(name, results):
        def measure():
            turns.append(name)
            return results.pop(0)

        return measure

    ours, theirs = (
        side("A", [1.0, 100.0, 2.0, 3.0]),
        side("B", [40.0, 10.0, 30.0, 20.0]),
    )
    # One busy moment, 100, moves a mean to 26.5; it must not move a median.
    assert interleaved(ours, theirs, 4) == (2.5, 25.0)
    assert "".join(turns) == "ABBAABBA"


def test_the_same_function_can_stand_on_both_sides():
    results = iter([1.0, 2.0, 3.0, 4.0])
    measure = results.__next__
    assert interleaved(measure, measure, 2) == (2.5, 2.5)  # 1 and 4; 2 and 3


def test_a_row_has_the_six_keys_and_its_ratio_follows():
    made = row("launch", "first launch", "seconds", 1.0, 4.0)
    assert list(made) == KEYS
    assert made["ratio"] == 0.25


def test_the_table_is_made_from_the_rows():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table([row("launch", "4 ranks", "seconds", 0.08, 3.2)]))
    words = console.export_text().split()
    for shown in ("4", "ranks", "seconds", "0.08", "3.2", "0.025", "40.0", "x"):
        assert shown in words


@pytest.fixture
def tiny_bench(monkeypatch):
    calls = []

    def measure(quick):
        calls.append(quick)
        yield row("tiny", "one", "bytes", 1.0, 2.0)
        yield row("tiny", "two", "bytes", 3.0, 2.0)

    monkeypatch.setitem(bench.BENCHES, "tiny", measure)
    return calls


def test_bench_prints_the_rows_that_it_writes(tiny_bench, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["bench", "tiny", "--quick", "--json", str(file)]) == 0
    assert tiny_bench == [True]
    rows = json.loads(file.read_text())
    assert [list(r) for r in rows] == [KEYS, KEYS]
    assert [r["ratio"] for r in rows] == [0.5, 1.5]
    shown = capsys.readouterr().out
    assert "one" in shown and "2.00 x" in shown and "0.67 x" in shown


def test_bench_lists_what_there_is(tiny_bench, capsys):
    assert main(["bench", "--list"]) == 0
    assert capsys.readouterr().out.split() == [
        "launch",
        "all-reduce",
        "ddp",
        "zero",
        "tp",
        "pp",
        "tiny",
    ]
    assert tiny_bench == []


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("nix", "there are: launch, all-reduce, ddp, zero, tp, pp, tiny"),
        ("", "which bench? there are: launch, all-reduce, ddp, zero, tp, pp, tiny"),
        ("tiny --json no/such/f", "cannot write no/such/f: there is no folder"),
        ("tiny --json /tmp", "cannot write /tmp: it is a folder"),
        ("tiny --figure /tmp/x.svg", "there is no figure of tiny"),
        ("tp --figure /tmp/x.doc", "its name must end in .svg, .png, .pdf"),
    ],
)
def test_bench_refuses_before_it_measures(
    typed, words, tiny_bench, capsys, monkeypatch
):
    monkeypatch.setitem(bench.BENCHES, "launch", None)  # must not be called
    assert main(["bench", *typed.split()]) == 1
    told = capsys.readouterr().err
    assert told.startswith("ddp-course: ") and told.count("\n") == 1
    assert words in told
    assert tiny_bench == []


def test_nothing_of_the_course_is_imported_on_their_side():
    look = (
        "import runpy, sys\n"
        "sys.argv = ['script', sys.argv[2]]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='not main')\n"
        "print(any(name.startswith('ddp_course') for name in sys.modules))"
    )

    def course_imported(side):
        command = [sys.executable, "-c", look, "-", side]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    assert course_imported("theirs") == "False"
    assert course_imported("ours") == "True"  # so the look can see it


@pytest.mark.kernel
def test_both_sides_launch_every_case_and_a_warm_one_of_ours_is_faster():
    seconds = {}
    for side in ("ours", "theirs"):
        with LaunchProcess(side) as process:
            for case in CASES:
                took, since_start = process.launch(case, 2)
                assert 0 < took < since_start
                seconds[side, case] = took
        assert process.process.returncode == 0
    # This was the second, so a warm one: 40 times faster, more than noise can turn.
    assert seconds["ours", "step"] < seconds["theirs", "step"]


@pytest.mark.kernel
def test_a_launch_that_fails_is_no_measurement(capfd):
    with LaunchProcess("ours") as process:
        with pytest.raises(CommandError, match="a launch of ours failed"):
            process.launch("no such case", 2)
    assert "KeyError" in capfd.readouterr().err or process.process.returncode


# ---- all-reduce --------------------------------------------------------------------


def test_turns_that_others_disturbed_are_left_out_if_enough_remain():
    calm, loud = [0.0] * all_reduce.ENOUGH, [0.9, 0.5]
    assert all_reduce.quiet([*loud, *calm]) == list(range(2, 2 + len(calm)))
    assert all_reduce.quiet([*loud, *calm[1:]]) == list(range(1 + len(calm)))


def test_what_others_took_is_neither_idle_nor_ours(tmp_path):
    # Two of our processes, 1 and 0.5 s of CPU in 2 s; the machine was busy for 2.5 s.
    told = [(1.0, 2.5, 2.0), (0.5, 2.4, 1.9)]
    assert others.share(told, cores=2) == pytest.approx(0.25)
    assert others.share([(3.0, 2.5, 2.0)], cores=2) == 0.0
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 9999 888 4 6 40 0 0\ncpu0 1 1 1\n")
    ticks = others.os.sysconf("SC_CLK_TCK")
    assert others.machine_seconds(stat) == pytest.approx(200 / ticks)
    assert others.machine_seconds(tmp_path / "none") == 0.0


@pytest.fixture(scope="module")
def quick_rows():
    return list(all_reduce.bench(True))


def test_every_all_reduce_is_measured_beside_gloos(quick_rows):
    names = {r["algorithm"] for r in quick_rows if r["metric"] == "seconds"}
    assert names == {
        *("naive", "tree", "halving_doubling", "ring", "shared_memory", "registered"),
        *("chosen", "reduce_scatter", "all_gather", "again", "gloo, patient"),
    }
    assert {r["algorithm"] for r in quick_rows} - names == {
        "ring beside loopback",
        "registered beside memory",
    }
    for r in quick_rows:
        assert r["ours"] > 0 and r["theirs"] > 0 and r["ranks"] == 2
        assert r["ratio"] == pytest.approx(r["ours"] / r["theirs"])
    assert {r["nbytes"] for r in quick_rows} == set(all_reduce.QUICK)


def test_each_collective_stands_beside_its_own_kind():
    times = {name: [1.0] for name in ("ring", "reduce_scatter", "all_gather")}
    times |= {"gloo all_reduce": [2.0], "again": [9.0], "registered": [0.5]}
    times |= {"gloo reduce_scatter": [3.0], "gloo all_gather": [4.0]}
    limits = {"memory": 100.0, "loopback": 50.0}
    rows = list(all_reduce.rows_of(4, 1 << 20, times, limits, 0.0))
    ratios = {r["algorithm"]: r["theirs"] for r in rows}
    assert ratios["reduce_scatter"] == 3.0 and ratios["all_gather"] == 4.0
    assert ratios["ring"] == ratios["registered"] == 2.0
    # 4 ranks: 2 (N - 1) / N = 3/2 of the bytes, in one second.
    [beside] = [r for r in rows if r["algorithm"] == "ring beside loopback"]
    assert beside["ours"] == 1.5 * (1 << 20) and beside["theirs"] == 50.0


def test_the_figure_of_the_bench(quick_rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.BENCHES, "all-reduce", lambda quick: iter(quick_rows))
    file = tmp_path / "figure.svg"
    assert main(["bench", "all-reduce", "--figure", str(file)]) == 0
    text = file.read_text()
    for shown in ("gloo", "ring", "shared_memory", "loopback", "memory"):
        assert shown in text
    assert main(["bench", "launch", "--figure", str(file)]) == 1
    assert "there is no figure of launch; only of all-reduce" in capsys.readouterr().err


def test_bandwidth_is_better_when_it_is_more():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table([row("b", "c", "bytes/s", 8.0, 2.0)]))
    assert "4.00 x" in console.export_text()
