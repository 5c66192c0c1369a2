"""Saves during training: the time that they cost a step, and processes killed in them.

A step sleeps for as long as a GPU would compute, so that the writer has the processor
to itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ddp_course.checkpoint import Checkpoints
from ddp_course.data import Corpus
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.train import History, train

STEP = 0.15  # seconds
MOST = 50  # the most steps between two saves, also if the earlier takes longer
MODEL = GPTConfig(n_layer=4, d_model=256, n_head=4)  # with Adam's states, 38 MB
TINY = {
    "batch_size": 6,
    "preset": GPTConfig(block_size=8, n_layer=2, n_head=2, d_model=8),
    "lr": 0.01,
}  # arguments of training runs that are stopped
SAVES = ("a save that waits", "a thread of ours", "PyTorch's async_save")

Spans = list[tuple[float, float]]


@dataclass
class SavedRun:
    """The spans, in seconds, of a training run that saves every few steps.

    Attributes:
        steps: the spans in which training computes.
        blocked: the spans in which training waits for a save.
        written: the spans in which a file is written.
    """

    steps: Spans = field(default_factory=list)
    blocked: Spans = field(default_factory=list)
    written: Spans = field(default_factory=list)

    @property
    def lost(self) -> float:
        """The seconds that a save costs a step: the least of all saves but the first.

        The first save allocates the memory for the copy; other processes on the same
        machine can only make a save longer.
        """
        return min(end - start for start, end in self.blocked[1:])


@contextmanager
def _span(spans: Spans):
    start = time.perf_counter()
    yield
    spans.append((start, time.perf_counter()))


def saved_runs(folder: str) -> dict[str, SavedRun]:
    """Train with each kind of save, on a rank: `async_save` needs a process group."""
    return {kind: saved_run(kind, folder) for kind in SAVES}


def saved_run(kind: str, folder: str, saves: int = 4) -> SavedRun:
    """Train, and save after two steps or more, once the last save is written.

    `kind` is one of SAVES.
    """
    model, run = build_gpt(MODEL, seed=0), SavedRun()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(1, 8, dtype=torch.int64)
    model(x, x)[1].backward()
    optimizer.step()  # allocates the optimizer's states
    save, finish = _saving(kind, Path(folder) / kind, model, optimizer, run)
    for number in range(1, saves + 1):
        for step in range(MOST):
            written = kind == SAVES[0] or len(run.written) == number - 1
            if step >= 2 and written:
                break
            with _span(run.steps):
                time.sleep(STEP)
        with _span(run.blocked):
            save(number)
    finish()
    return run


def _saving(
    kind: str,
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: SavedRun,
) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Return a function that saves a step, and one that waits for the last save."""
    if kind == SAVES[2]:
        return _by_pytorch(folder, model, optimizer, run)
    background = kind == SAVES[1]
    checkpoints = Checkpoints(folder, 1, model, optimizer, {}, background=background)
    checkpoints.load(10**6)
    if not background:
        return lambda step: checkpoints.save([0.0] * step), lambda: None
    write = checkpoints.writer.write

    def recorded(*args: object) -> None:
        with _span(run.written):
            write(*args)

    checkpoints.writer.write = recorded
    return lambda step: checkpoints.save([0.0] * step), checkpoints.writer.wait


def _by_pytorch(
    folder: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    run: SavedRun,
) -> tuple[Callable[[int], None], Callable[[], None]]:
    under_way: list[tuple[Future, threading.Event]] = []

    def finish() -> None:
        for future, noted in under_way:
            future.result()
            noted.wait()  # a future's callbacks run after its waiters are woken

    def save(step: int) -> None:
        finish()
        start = time.perf_counter()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        future = dcp.async_save(state, checkpoint_id=folder / str(step))
        noted = threading.Event()

        def note(_: Future) -> None:
            run.written.append((start, time.perf_counter()))
            noted.set()

        future.add_done_callback(note)
        under_way[:] = [(future, noted)]

    return save, finish


def train_until_killed(folder: str, seconds: float, steps: int) -> None:
    """Train and save after every step; the kernel kills this process in the middle.

    Args:
        folder: the folder of the checkpoints from which training resumes.
        seconds: the time from the second step of this process, when its first save is
            finished, until it is killed.
        steps: the number of steps after which training would end.
    """
    seen: list[int] = []

    def start_timer(step: int, _: float) -> None:
        seen.append(step)
        if len(seen) == 2:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process at once
            signal.setitimer(signal.ITIMER_REAL, seconds)

    how = {"checkpoint": folder, "every": 1, "save": "async", "on_step": start_timer}
    train(steps, **TINY, **how)


def train_until_notice(
    folder: str | None = None, victim: int | None = None, at: int = 0
) -> History:
    """Train for 6 steps on several ranks; one gets SIGTERM in step `at`.

    Args:
        folder: the folder of the checkpoints; without one, nothing is saved.
        victim: the rank that gets the signal, or None.
        at: the number of the step, from 1.
    """
    batch, steps = Corpus.batch, []

    def batch_and_signal(*args: object) -> object:
        steps.append(1)
        if dist.get_rank() == victim and len(steps) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(*args)

    with mock.patch.object(Corpus, "batch", batch_and_signal):
        return train(6, **TINY, checkpoint=folder, every=100)
