"""Training on real ranks, one of which is killed at random times, again and again.

Every attempt continues from the last checkpoint and ends when SIGKILL ends one rank,
be it in a step or in a save. A step sleeps in place of computing, and a save lasts
`SAVE` seconds, as if it were written to a slow disk; all-reduces, checkpoints and kills
are real. Chapter 19.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.launch import spawn

STEP, SAVE, MEAN = 0.004, 0.015, 0.3  # seconds; MEAN: mean time between failures
WIDTH, ROWS, RANKS = 8, 4, 2


@dataclass
class Progress:
    """All that a checkpoint holds: step, weights, and the seconds of work so far."""

    step: int
    weights: Tensor
    worked: float


@dataclass(frozen=True)
class KilledRun:
    """A training run after its last failure.

    `ran` are the seconds in which its ranks ran, without restarts, and `kept` is what
    its last checkpoint holds.
    """

    ran: float
    kept: Progress

    @property
    def time(self) -> float:
        """Seconds that passed for each second of work that was kept."""
        return self.ran / self.kept.worked if self.kept.worked else math.inf


def gradient(weights: Tensor, step: int, rank: int) -> Tensor:
    """Return the gradient of a linear regression on rows of this step and rank."""
    rows = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(ROWS, WIDTH, generator=rows)
    return x.T @ (x @ weights - x.sum(1)) / ROWS


def run_until_killed(folder: str, interval: float, rank: int, seconds: float) -> None:
    """Train on this rank, and save after each `interval` seconds of work.

    `rank` is killed after `seconds`; the other ranks then fail in their all-reduce.
    """
    own, path = dist.get_rank(), Path(folder, "checkpoint.pt")
    progress = load(path)
    dist.barrier()
    if own == rank:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    unsaved = 0.0
    while True:
        start = time.perf_counter()
        mean = gradient(progress.weights, progress.step, own)
        time.sleep(STEP)  # as long as a larger model computes
        dist.all_reduce(mean)
        progress.weights -= 0.1 * mean / RANKS
        progress.step += 1
        unsaved += time.perf_counter() - start
        if own == 0 and unsaved >= interval:  # rank 1 waits in its next all-reduce
            progress.worked += unsaved
            save(progress, path)
            unsaved = 0.0


def load(path: Path) -> Progress:
    """Return what the last complete checkpoint holds, or the start of a new run."""
    if path.exists():
        return Progress(**torch.load(path))
    return Progress(0, torch.zeros(WIDTH), 0.0)


def save(progress: Progress, path: Path) -> None:
    """Write a checkpoint in `SAVE` seconds; once complete, it replaces the last one."""
    start = time.perf_counter()
    torch.save(vars(progress), path.with_suffix(".part"))
    time.sleep(max(0.0, SAVE - (time.perf_counter() - start)))
    path.with_suffix(".part").replace(path)


def times_to_failure(count: int, mean: float, dice: Random) -> list[float]:
    """Return `count` quantiles of exponentially distributed times, in random order.

    So a few failures have nearly the mean and the spread of many.
    """
    shares = [(k + 0.5) / count for k in range(count)]
    dice.shuffle(shares)
    return [-mean * math.log1p(-share) for share in shares]


def killed_runs(
    intervals: Sequence[float], failures: int, seed: int = 0
) -> dict[float, KilledRun]:
    """Train with each interval until the run's ranks were killed `failures` times.

    All training runs have the same failures. The runs take turns, so that a busy moment
    of the machine disturbs all of them.
    """
    dice = Random(seed)
    times = times_to_failure(failures, MEAN, dice)
    with TemporaryDirectory() as parent:
        folders = {interval: tempfile.mkdtemp(dir=parent) for interval in intervals}
        for seconds in times:
            victim = dice.randrange(RANKS)
            for interval, folder in folders.items():
                run_once(folder, interval, victim, seconds)
        return {
            interval: KilledRun(sum(times), load(Path(folder, "checkpoint.pt")))
            for interval, folder in folders.items()
        }


def run_once(folder: str, interval: float, victim: int, seconds: float) -> None:
    """Start ranks that continue from the folder's checkpoint, until one is killed."""
    reports = spawn(
        run_until_killed, folder, interval, victim, seconds,
        world_size=RANKS, check=False, output="none",
    )  # fmt: skip
    if reports[victim].status != "killed":
        raise RuntimeError(f"rank {victim} was not killed: {reports[victim].line}")


def undisturbed(steps: int) -> Tensor:
    """Return the weights after `steps` steps of the same training in one process."""
    weights = torch.zeros(WIDTH)
    for step in range(steps):
        mean = torch.zeros(WIDTH)
        for rank in range(RANKS):
            mean += gradient(weights, step, rank)
        weights -= 0.1 * mean / RANKS
    return weights
