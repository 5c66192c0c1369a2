"""Ranks that are killed at random times lose time, and nothing else."""

import math
import os
import signal
import statistics
import threading
import time
from random import Random

import pytest
import torch

from ddp_course.bench.killed import (
    SAVE,
    KilledRun,
    Progress,
    killed_runs,
    load,
    save,
    times_to_failure,
    undisturbed,
)
from ddp_course.launch import spawn


def test_a_killed_training_goes_on_bit_by_bit():
    [run] = killed_runs([0.05], 3).values()
    assert run.kept.step > 5
    assert torch.equal(run.kept.weights, undisturbed(run.kept.step))
    assert not torch.equal(run.kept.weights, undisturbed(run.kept.step - 1))
    assert 1 < run.time < float("inf")


def saved_until_killed(folder):
    threading.Timer(SAVE * 4.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(1, 99):
        save(Progress(step, torch.full((8,), float(step)), 0.1 * step), folder / "c.pt")


def test_a_save_that_is_killed_leaves_the_last_whole_checkpoint(tmp_path):
    [report] = spawn(
        saved_until_killed, tmp_path, world_size=1, check=False, output="none"
    )
    assert report.status == "killed"
    assert (tmp_path / "c.part").exists()
    found = load(tmp_path / "c.pt")
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
