"""Hundreds of launches: none fails, and none leaves anything behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from conftest import none_left

from ddp_course.launch import RankInterrupted, RankTimeout, spawn

ENDURANCE = bool(os.environ.get("DDP_COURSE_ENDURANCE"))  # everything, however long
pytestmark = [pytest.mark.endurance, pytest.mark.timeout(600)]


def add_ranks():
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item()


def test_50_launches_at_once_from_one_process():
    with ThreadPoolExecutor(50) as threads:
        told = list(threads.map(lambda _: spawn(add_ranks, world_size=2), range(50)))
    assert told == [[1.0, 1.0]] * 50


@pytest.mark.skipif(not ENDURANCE, reason="only with DDP_COURSE_ENDURANCE=1")
def test_launches_at_once_from_five_processes(tmp_path):
    script = tmp_path / "ten.py"
    script.write_text(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from test_endurance import add_ranks\n"
        "from ddp_course.launch import spawn\n"
        "with ThreadPoolExecutor(10) as threads:\n"
        "    f = lambda _: spawn(add_ranks, world_size=2, output='none')\n"
        "    print(list(threads.map(f, range(10))))\n"
    )
    path = os.pathsep.join(p for p in sys.path if p)
    runs = [
        subprocess.Popen(
            [sys.executable, script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for _ in range(5)
    ]
    assert [run.communicate(timeout=300)[0] for run in runs] == [
        f"{[[1.0, 1.0]] * 10}\n"
    ] * 5


@pytest.fixture
def deaf():
    """Ignore Ctrl-C outside of launches: the test itself must survive its own stops."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


def stops_at_random_moments(times: int) -> tuple[int, list[int]]:
    """Press stop, once or hammered, during start, run or end of `times` launches.

    Return how many were stopped, and the process ids of their ranks.
    """

    def work(seconds):
        print(os.getpid(), flush=True)
        time.sleep(seconds)

    def press(after, presses):
        time.sleep(after)
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)

    dice = random.Random(0)
    stopped, pids = 0, []
    for _ in range(times):
        how = dice.uniform(0, 0.2), dice.choice([1, 1, 5])
        finger = threading.Thread(target=press, args=how)
        finger.start()
        try:
            spawn(work, dice.choice([0.02, 60]), world_size=2, output="none", timeout=2)
        except RankInterrupted as stop:
            stopped += 1
            pids += [int(word) for r in stop.reports for word in r.output.split()]
            assert all(r.status in ("ok", "unfinished") for r in stop.reports)
        except RankTimeout:
            pass  # the stop came before the launch listened
        finger.join()
    return stopped, pids


def test_many_launches_in_a_row_beside_others_that_are_stopped(no_leftovers, deaf):
    """The stop button is the main thread's: launches of another thread go on.

    50 and 20 of them; 500 and 200 with DDP_COURSE_ENDURANCE=1.
    """
    many = 10 if ENDURANCE else 1
    with ThreadPoolExecutor(1) as other:
        row = other.submit(
            lambda: [spawn(add_ranks, output="none") for _ in range(50 * many)]
        )
        stopped, pids = stops_at_random_moments(20 * many)
        assert row.result() == [[6.0] * 4] * 50 * many
    assert stopped > 5 * many
    assert none_left(pids)
