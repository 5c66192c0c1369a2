"""The benches: what they return is what was measured, and the two sides are fair."""

import builtins
import json
import runpy
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from drawings import no_texts_overlap
from refusals import answered

from ddp_course import bench, cli
from ddp_course.bench import all_reduce, compression, launch, steps, table, turns
from ddp_course.bench.launch import CASES, SCRIPT, LaunchProcess
from ddp_course.bench.turns import ENOUGH, Pair, in_turns, row, rows_of, slowest
from ddp_course.cli import main
from ddp_course.commands.bench_figure import plot_bench
from ddp_course.launch import LaunchError, here, spawn

KEYS = ["bench", "case", "variant", "denominator", "metric", "ours", "theirs", "ratio"]
NAMES = ["all-reduce", "async", "attention", "compression", "ddp", "experts"]
NAMES += ["interval", "launch", "order", "pp", "precision", "predict", "tp", "zero"]


# ---- the loop ------------------------------------------------------------------------


def test_all_are_measured_in_turns_and_none_always_first():
    times = {"A": [1.0, 100.0, 2.0, 3.0], "B": [40.0, 10.0, 30.0, 20.0]}
    called = []

    def side(name, results):
        return lambda: called.append(name) or results.pop(0)

    sides = {name: side(name, [*t]) for name, t in times.items()}
    found = in_turns(sides, 4, repeat=0)
    assert found[0] == times
    order = "".join(called)
    assert order[:2] == order[3:1:-1] and order[4:6] == order[7:5:-1]
    calm = [(found[0], [(1.0, 1.0, 1.0)] * 4)]
    [row] = rows_of("c", [Pair("A", "B"), Pair("A", "nobody")], calm)
    # One busy moment, 100, moves a mean to 26.5; it must not move a median.
    assert (row["ours"], row["theirs"]) == (2.5, 25)
    assert row["paired"] == pytest.approx((1 / 40 + 3 / 20) / 2, abs=0.1)


def test_calls_are_timed_after_one_that_does_not_count():
    called, met = [], []
    once, meet = lambda: called.append(len(met)), lambda: met.append(0)
    times, others = in_turns({"A": once}, 5, 3, meet=meet, go_on=lambda: False)
    assert called == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3]  # three turns at least
    assert len(times["A"]) == len(others) == 3


# ---- the table -----------------------------------------------------------------------

PAIRS = (
    Pair("gloo", "best", at_most={128: 0.9}),
    Pair("again", "best", control=True),
    Pair("gloo", "default"),
)


def rows_like(ratios, tokens=(128, 1024), pairs=PAIRS):
    return [
        row(f"2 ranks, {t}", p, "seconds", 2 * ratio, 2, paired=ratio, tokens=t)
        for t in tokens
        for p, ratio in zip(pairs, ratios, strict=False)
    ]


def test_a_line_for_each_case_and_a_column_for_each_pair():
    text = table.lines("Ours over theirs.", PAIRS, rows_like((0.8, 1.02, 0.5)))
    assert text[0].startswith("Ours over theirs.")
    at = text.index("over best")
    assert text[at + 1].split() == ["ms", "gloo", "again"]
    assert text[at + 2].split() == ["2", "ranks,", "128", "2,000", "0.80", "1.02"]
    last = [line.split()[-1] for line in text if line.startswith("2 ranks, 1024")]
    assert last == ["1.02", "0.50"]
    assert text[text.index("Required, and met?") + 1 :] == [
        "  yes    gloo over best at most 0.9: 0.80",
        "  noise  again over best, the same twice: 1.02 to 1.02",
    ]


def test_what_did_not_hold_is_said_with_its_case():
    text = table.lines("", PAIRS, rows_like((0.95,)))
    assert text[-1] == "  no     gloo over best at most 0.9: 0.95; not in 2 ranks, 128"
    loud = [{**r, "others": 0.5} for r in rows_like((0.8,))]
    assert "took up to 50% of the machine" in " ".join(table.lines("", PAIRS, loud))


@pytest.mark.parametrize("name", NAMES)
def test_no_line_of_any_bench_is_too_long(name):
    pairs = bench.load(name).PAIRS
    rows = [
        row(f"4 ranks, 1m, {t} tokens", p, "seconds", 1.5, 1, tokens=t, others=0.9)
        for p in pairs
        for t in (128, 1024)
    ]
    text = table.lines(bench.benches()[name], pairs, rows)
    assert max(map(len, text)) <= 100
    heads = dict.fromkeys(f"over {p.over or p.denominator}" for p in pairs)
    assert [line for line in text if line.startswith("over ")] == [*heads]


# ---- the command ---------------------------------------------------------------------


@pytest.fixture
def tiny_bench(monkeypatch):
    calls = []

    def measure(quick):
        calls.append(quick)
        yield row("one", pair, "bytes", 1.0, 2.0)
        yield row("two", pair, "bytes", 3.0, 2.0)

    pair = Pair("ours", "theirs")
    tiny = SimpleNamespace(ABOUT="A bench.", PAIRS=[pair], bench=measure)
    known = bench.benches() | {"tiny": "A bench."}
    monkeypatch.setattr(bench, "benches", lambda: known)
    monkeypatch.setattr(cli, "benches", lambda: known)
    monkeypatch.setattr(bench, "load", lambda name: tiny)
    return calls


def test_bench_prints_the_rows_that_it_writes(tiny_bench, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert main(["bench", "tiny", "--quick", "--json", str(file)]) == 0
    assert tiny_bench == [True]
    rows = json.loads(file.read_text())
    assert [list(r) for r in rows] == [KEYS, KEYS]
    assert [r["ratio"] for r in rows] == [0.5, 1.5]
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("A bench.")
    assert [line.split()[-1] for line in shown[-2:]] == ["0.50", "1.50"]


def test_bench_lists_what_there_is_with_a_sentence_each(tiny_bench, capsys):
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == [*NAMES, "tiny"]
    assert all(line.endswith(".") and len(line) <= 100 for line in shown)
    assert tiny_bench == []


def test_a_bench_is_found_by_looking(tmp_path, monkeypatch):
    (tmp_path / "two_words.py").write_text("ABOUT = 'New.'\nPAIRS, bench = (), iter\n")
    (tmp_path / "helper.py").write_text("PAIRS = ()\n")
    monkeypatch.setattr(bench, "__path__", [*bench.__path__, str(tmp_path)])
    assert sorted(bench.benches()) == sorted([*NAMES, "two-words"])
    assert bench.load("two-words").ABOUT == "New."
    sys.modules.pop("ddp_course.bench.two_words")


def test_a_quick_bench_measures_real_cases_and_a_full_one_more():
    quick, full = ({c[:3] for c in steps.cases(how)} for how in (True, False))
    assert quick == {(2, "1m", 128), (4, "1m", 128)} < full
    assert set(all_reduce.QUICK) < set(all_reduce.SIZES)
    assert max(all_reduce.QUICK) == 1 << 24


@pytest.fixture
def nothing_is_measured(tiny_bench):
    yield
    assert tiny_bench == []


test_bench_refuses_before_it_measures = answered(
    "bench",
    1,
    ("nix", f"there are: {', '.join(NAMES)}, tiny"),
    ("", f"which bench? there are: {', '.join(NAMES)}, tiny"),
    ("tiny --json no/such/f", "cannot write no/such/f: there is no folder"),
    ("tiny --json /tmp", "cannot write /tmp: it is a folder"),
    ("tiny --figure /tmp/x.doc", "its name must end in .svg, .png, .pdf"),
    fixtures=["nothing_is_measured"],
)


# ---- launches ------------------------------------------------------------------------


def script(side, monkeypatch):
    """Return what the script defines on this side, and what it itself imports."""
    names, real = set(), builtins.__import__

    def noting(name, globals=None, *rest):
        if (globals or {}).get("__name__") == "not main":
            names.add(name.partition(".")[0])
        return real(name, globals, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), side])
        patch.setattr(builtins, "__import__", noting)
        return runpy.run_path(str(SCRIPT), run_name="not main"), names


def test_nothing_of_the_course_is_imported_on_their_side(monkeypatch):
    theirs, ours = (script(side, monkeypatch)[1] for side in ("theirs", "ours"))
    assert "torch" in theirs and ours - theirs == {"ddp_course"}


def test_both_sides_launch_every_case(monkeypatch):
    defined, _ = script("ours", monkeypatch)
    launched = []

    def in_warm_processes(fn, args, nprocs):
        launched.append(args[0])
        spawn(lambda: fn(here().rank, *args), world_size=nprocs, init=False)

    monkeypatch.setattr(torch.multiprocessing, "spawn", in_warm_processes)
    for case in CASES:
        for side in ("ours", "theirs"):
            defined["launch"](side, case, 2)
    assert launched == list(CASES)


@pytest.mark.kernel
def test_a_launch_is_timed_in_a_process_that_ends_and_one_that_fails_is_told(
    tmp_path, monkeypatch, capfd
):
    with LaunchProcess("theirs") as process:
        took = process.launch("all_reduce", 1)
        assert 0 < took < process.since_start
    assert process.returncode == 0
    (tmp_path / "fails.py").write_text("input()\n1 / 0")
    monkeypatch.setattr(launch, "SCRIPT", tmp_path / "fails.py")
    with LaunchProcess("theirs") as process:
        with pytest.raises(LaunchError, match="a launch of theirs failed"):
            process.launch("all_reduce", 1)
    assert process.returncode != 0
    warm = []
    for _ in range(3):  # one of them without a pause by other programs
        start = time.perf_counter()
        spawn(lambda: None, world_size=1, output="none")
        warm.append(time.perf_counter() - start)
    assert min(warm) < took


# ---- all-reduce --------------------------------------------------------------------


def test_turns_that_others_disturbed_are_left_out_if_enough_remain():
    calm, loud = [(1.0, 1.0, 1.0)] * ENOUGH, [(0.0, 99.0, 1.0)] * 2
    numbers = {"a": [float(k) for k in range(ENOUGH + 2)]}
    assert slowest([(numbers, loud + calm)])[0]["a"] == numbers["a"][2:]
    assert len(slowest([(numbers, loud + calm[1:])])[0]["a"]) == ENOUGH + 1


def test_exposed_communication_is_without_what_computing_takes():
    waits = dict.fromkeys(compression.METHODS, 52.0) | {"ddp": 100.0, "alone": 20.0}
    timings = [({name: [t] * 8 for name, t in waits.items()}, [(1.0, 1.0, 1.0)] * 8)]
    rows = {r["variant"]: r for r in compression.exposed_rows("case", timings)}
    assert (rows["int8"]["ours"], rows["int8"]["theirs"]) == (32, 80)
    assert rows["int8"]["paired"] == 0.4  # and not 52 / 100
    assert [p.at_most for p in compression.EXPOSED if p.variant == "int8"] == [0.45]


def test_what_others_took_is_neither_idle_nor_ours(tmp_path):
    # Two of our processes, 1 and 0.5 s of CPU in 2 s; the machine was busy for 2.5 s.
    results = [(1.0, 2.5, 2.0), (0.5, 2.4, 1.9)]
    assert turns.share(results, cores=2) == pytest.approx(0.25)
    assert turns.share([(3.0, 2.5, 2.0)], cores=2) == 0.0
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 20 30 9999 888 4 6 40 0 0\ncpu0 1 1 1\n")
    ticks = turns.os.sysconf("SC_CLK_TCK")
    assert turns.machine_seconds(stat) == pytest.approx(200 / ticks)
    assert turns.machine_seconds(tmp_path / "none") == 0.0


@pytest.fixture(scope="module")
def measured_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_reduce, "QUICK", {4096: 3, 1 << 20: 1})
        patch.setattr(steps, "RANKS", (2,))
        return list(all_reduce.bench(True))


def test_every_all_reduce_is_measured_beside_gloos(measured_rows):
    compared = {(r["variant"], r["denominator"], r["metric"]) for r in measured_rows}
    assert compared == {
        (p.variant, p.denominator, "bytes/s" if p in all_reduce.LIMITED else "seconds")
        for p in all_reduce.PAIRS
    }
    for r in measured_rows:
        assert r["ours"] > 0 and r["theirs"] > 0
        assert r["ratio"] == pytest.approx(r["ours"] / r["theirs"])
    cases = {(r["ranks"], r["nbytes"]) for r in measured_rows}
    assert cases == {(2, 4096), (2, 1 << 20)}


def test_each_collective_stands_beside_its_own_kind():
    times = {name: [1.0] for name in ("ring", "reduce_scatter", "all_gather")}
    times |= {"gloo all_reduce": [2.0], "again": [9.0], "registered": [0.5]}
    times |= {"gloo reduce_scatter": [3.0], "gloo all_gather": [4.0]}
    limits, results = {"memory": 100.0, "loopback": 50.0}, [(times, [(1.0, 1.0, 1.0)])]
    found = all_reduce.rows_of_size(4, 1 << 20, results, limits)
    seen = {(r["variant"], r["metric"]): (r["ours"], r["theirs"]) for r in found}
    assert seen["reduce_scatter", "seconds"] == (1, 3)
    assert seen["all_gather", "seconds"] == (1, 4)
    assert seen["ring", "seconds"] == (1, 2) and seen["again", "seconds"] == (9, 2)
    # 4 ranks: 2 (N - 1) / N = 3/2 of the bytes, in one second.
    assert seen["ring", "bytes/s"] == (1.5 * (1 << 20), 50)


# ---- the figure ----------------------------------------------------------------------


def test_the_figure_has_every_pair_and_what_is_asked_for(measured_rows, tmp_path):
    figure = plot_bench(PAIRS, rows_like((0.8, 1.02, 0.5)))
    first, second = figure.axes
    marks = {line.get_label(): list(line.get_xdata()) for line in first.lines}
    assert marks["gloo"] == [0.8, 0.8] and marks["again (noise)"] == [1.02, 1.02]
    asked = [line for line in first.lines if line.get_label() == "_bar"]
    assert [list(line.get_xdata()) for line in asked] == [[0.9, 0.9]]
    assert [line.get_label() for line in second.lines] == ["gloo", "_equal"]
    heights = [set(line.get_ydata()) for line in first.lines[:2]]
    assert not heights[0] & heights[1]  # none hides another
    with pytest.raises(ValueError, match="no rows"):
        plot_bench(PAIRS, [])
    file = tmp_path / "figure.svg"
    plot_bench(all_reduce.PAIRS, measured_rows).savefig(file)
    for shown in ("over gloo all_reduce", "ring", "shared memory", "the bandwidth"):
        assert shown in file.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_texts_of_the_figure_do_not_overlap(name):
    pairs = bench.load(name).PAIRS
    rows = rows_like([0.7] * len(pairs), pairs=pairs)
    no_texts_overlap(lambda: plot_bench(pairs, rows))
