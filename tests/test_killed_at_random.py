"""Ranks that are killed at random times lose time, and nothing else."""

import math
import os
import signal
import statistics
import time
from random import Random
from types import SimpleNamespace

import pytest
import torch

from ddp_course.bench import killed
from ddp_course.bench.killed import (
    SAVE,
    STEP,
    KilledRun,
    Progress,
    killed_runs,
    load,
    run_until_killed,
    save,
    times_to_failure,
    undisturbed,
)
from ddp_course.launch import spawn


@pytest.mark.timeout(900)
def test_a_killed_training_goes_on_bit_by_bit(monkeypatch):
    for mean in (killed.MEAN, 2.0, 10.0):  # later, where a machine is very busy
        monkeypatch.setattr(killed, "MEAN", mean)
        [run] = killed_runs([0.05], 3).values()
        if run.kept.step > 5:
            break
    assert run.kept.step > 5
    assert torch.equal(run.kept.weights, undisturbed(run.kept.step))
    assert not torch.equal(run.kept.weights, undisturbed(run.kept.step - 1))
    assert run.ran == pytest.approx(sum(times_to_failure(3, mean, Random(0))))
    assert run.kept.worked >= 0.999 * STEP * run.kept.step


def test_work_that_is_kept_counts_once_and_lost_work_never(tmp_path, monkeypatch):
    """On a clock that goes on in sleeps alone: the numbers are the same anywhere."""
    clock, messages = [0.0], []

    def sleep(seconds):
        clock[0] += seconds

    def all_reduce(mean):
        messages.append(mean)
        if len(messages) % 20 == 0:
            raise ConnectionError("rank 1 was killed")

    alone = {"get_rank": lambda: 0, "barrier": lambda: None, "all_reduce": all_reduce}
    times = {"perf_counter": lambda: clock[0], "sleep": sleep}
    monkeypatch.setattr(killed, "dist", SimpleNamespace(**alone))
    monkeypatch.setattr(killed, "time", SimpleNamespace(**times))
    for kept in (13, 26):  # of 19 more steps; 13 take an interval of 0.05 seconds
        with pytest.raises(ConnectionError):
            run_until_killed(str(tmp_path), 0.05, rank=1, seconds=1.0)
        found = load(tmp_path / "checkpoint.pt")
        assert found.step == kept
        assert found.worked == pytest.approx(kept * STEP)
    assert clock[0] == pytest.approx(40 * STEP + 2 * SAVE)
    run = KilledRun(clock[0], found)
    assert run.time == pytest.approx((40 * STEP + 2 * SAVE) / (26 * STEP))


def saved_until_killed(folder):
    """Save again and again; the fifth save is killed, on its slow disk."""
    sleeps = []

    def sleep(seconds):
        sleeps.append(seconds)
        if len(sleeps) == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    killed.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=sleep)
    for step in range(1, 99):
        save(Progress(step, torch.full((8,), float(step)), 0.1 * step), folder / "c.pt")


def test_a_save_that_is_killed_leaves_the_last_whole_checkpoint(tmp_path):
    [report] = spawn(
        saved_until_killed, tmp_path, world_size=1, check=False, output="none"
    )
    assert report.status == "killed"
    assert (tmp_path / "c.part").exists()
    found = load(tmp_path / "c.pt")
    assert found.step == 4
    assert torch.equal(found.weights, torch.full((8,), float(found.step)))


def test_a_save_takes_as_long_as_a_slow_disk(tmp_path):
    start = time.perf_counter()
    save(Progress(1, torch.zeros(8), 0.1), tmp_path / "c.pt")
    assert time.perf_counter() - start >= SAVE


@pytest.mark.parametrize("count", [5, 20])
def test_few_times_are_like_many(count):
    times = times_to_failure(count, 2.0, Random(1))
    assert statistics.mean(times) == pytest.approx(2, rel=0.1)
    assert statistics.median(times) == pytest.approx(2 * math.log(2), rel=0.1)
    assert sorted(times) != times != times_to_failure(count, 2.0, Random(2))


def test_a_training_without_a_checkpoint_keeps_nothing(tmp_path):
    assert KilledRun(2.0, load(tmp_path / "none.pt")).time == float("inf")
