"""Chapter 19: incomplete checkpoints, streams, saves beside a training, kills."""

import os
import random

import pytest

from ddp_course.chapters.ch19_failures.contents import (
    Run,
    resumed,
    rows_of_streams,
)
from ddp_course.chapters.ch19_failures.figures import betrayed, saved
from ddp_course.chapters.ch19_failures.saves import (
    SAVES,
    TINY,
    SavedRun,
    saved_runs,
    train_until_killed,
    train_until_notice,
)
from ddp_course.failures.async_save import snapshot
from ddp_course.launch import spawn
from ddp_course.mechanisms import saving
from ddp_course.train import train

ENDURANCE = bool(os.environ.get("DDP_COURSE_ENDURANCE"))


def one_thread(call, *args):
    """Call it on a rank: with more threads, sums may be rounded otherwise."""
    return spawn(call, *args, world_size=1, output="none")[0]


def test_a_whole_checkpoint_resumes_bit_for_bit_and_no_other():
    curves = one_thread(resumed, 24, 12)
    whole = curves.pop("whole")
    assert curves.pop("nothing") == whole
    first = {
        name: next(k for k, (a, b) in enumerate(zip(c, whole, strict=True)) if a != b)
        for name, c in curves.items()
    }
    late = {"optimizer", "scaler"}  # they are used after the first loss
    assert first == {name: int(name in late) for name in Run().parts}
    figure = betrayed({"whole": whole, **curves})
    assert len(figure.axes) == 2 * len(curves)


def test_the_run_is_saved_in_mid_epoch_when_its_scale_has_been_found():
    def state():
        run = Run()
        run.train(40)
        return run.checkpoint()["position"], run.parts["scaler"].factor

    position, scale = one_thread(state)
    assert position["used"] > 0
    assert scale < 2**24


def test_a_checkpoint_of_references_is_caught():
    def curves():
        run = Run()
        run.train(8)
        live = run.checkpoint()
        copy = snapshot(live)
        whole = run.train(4)  # changes what `live` refers to
        return whole, *(Run(1).resume(c).train(4) for c in (copy, live))

    whole, from_copy, from_live = one_thread(curves)
    assert from_copy == whole != from_live


def test_streams_yield_rows_for_each_rank_and_worker():
    def times(name):
        ranks = spawn(rows_of_streams, name, world_size=2, output="none")
        rows = sum(ranks, [])
        assert {*rows} == {*range(24)}
        return len(rows) / 24

    names = "as it is", "by ranks", "by ranks and workers"
    assert [times(name) for name in names] == [4, 2, 1]


def test_a_thread_saves_in_a_fraction_of_the_time(tmp_path):
    for number in range(3):  # other programs can take the core from the short one
        runs = one_thread(saved_runs, str(tmp_path / f"{number}"))
        waits, ours, pytorchs = (runs[name] for name in SAVES)
        if ours.lost < 0.5 * waits.lost:  # .09 on a quiet machine
            break
    assert ours.lost < 0.5 * waits.lost
    assert [len(run.blocked) for run in runs.values()] == [4, 4, 4]
    assert (len(waits.written), len(ours.written), len(pytorchs.written)) == (0, 4, 4)
    assert saved(runs).axes


def test_lost_time_is_that_of_the_shortest_save_but_the_first():
    run = SavedRun(blocked=[(0, 1), (2, 2.5), (3, 3.25)])
    assert run.lost == 0.25


@pytest.mark.endurance
@pytest.mark.timeout(3000)
def test_what_the_kernel_kills_leaves_whole_checkpoints(tmp_path, record_property):
    """At any instruction, where tests/test_killed_while_saving.py counts calls."""
    dice, unfinished, kills = random.Random(0), 0, 300 if ENDURANCE else 4
    for _ in range(kills):
        seconds = dice.uniform(0.001, 0.05)
        call = train_until_killed, str(tmp_path), seconds, 10**6
        [report] = spawn(*call, world_size=1, init=False, check=False, output="none")
        assert report.error == "killed by SIGALRM"
        unfinished += any(p.name.startswith(saving.WRITING) for p in tmp_path.iterdir())

    def finished():
        newest = max(int(p.stem[5:]) for p in tmp_path.glob("step-*.pt"))
        last = train(newest + 2, **TINY, checkpoint=tmp_path)
        return last, newest, train(newest + 2, **TINY)

    last, newest, whole = one_thread(finished)
    assert last.resumed_at == newest > 0
    assert (last.losses, last.checksum) == (whole.losses, whole.checksum)
    record_property("kills", kills)
    record_property("in a write", unfinished)


def test_a_notice_to_one_rank_stops_all(tmp_path):
    stopped = spawn(train_until_notice, str(tmp_path), 0, 2, world_size=2)
    assert [(len(h.losses), h.stopped) for h in stopped] == [(2, True)] * 2
