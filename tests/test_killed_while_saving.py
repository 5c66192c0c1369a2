"""Ranks killed with -9 at random moments of a save: nothing is lost, bit by bit.

A moment is a call or a return of a function, Python's or C's, on one rank while it is
in `save`: collecting states, writing, flushing, renaming, removing what is old. If a
thread saves, it is one of the thread's. With DDP_COURSE_ENDURANCE=1 there are 30 of
them in every layout, 300 in a thread; else two, in a thread. (Ranks that are killed in
the middle of a file are in test_checkpoint.py and zero/test_sharded_checkpoint.py.)
"""

import io
import math
import os
import random
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ddp_course import checkpoint
from ddp_course.checkpoint import Checkpoints
from ddp_course.launch import RankError, spawn
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.train import train
from ddp_course.zero import (
    FullyShardedDataParallel,
    full_state_dict,
    sharded_checkpoint,
)

ENDURANCE = bool(os.environ.get("DDP_COURSE_ENDURANCE"))
pytestmark = [pytest.mark.endurance, pytest.mark.timeout(3000)]
GPT = GPTConfig(block_size=8, n_layer=2, n_head=2, d_model=8)
RUN = {"batch_size": 4, "preset": GPT, "lr": 0.01, "every": 1}
LAYOUTS = {  # ranks, options
    "ddp": (2, {}),
    "async": (2, {"save": "async"}),
    "compressed": (2, {"compress": "topk:0.1"}),
    "local steps": (2, {"local_steps": 3, "outer": "nesterov"}),
    "zero1": (2, {"zero": 1}),
    "zero3": (2, {"zero": 3}),
    "tp": (2, {"tp": 2}),
    "pp": (2, {"pp": 2, "schedule": "1f1b", "microbatches": 2}),
    "zero2 tp": (4, {"zero": 2, "dp": 2, "tp": 2}),
    "zero3 tp": (4, {"zero": 3, "dp": 2, "tp": 2}),
    "hybrid": (4, {"zero": 3, "shard": 2}),
    "all axes": (
        8,
        {"zero": 1, "dp": 2, "tp": 2, "pp": 2, "microbatches": 2},
    ),
}
CHOSEN = LAYOUTS if ENDURANCE else ["async"]
KILLS = 30 if ENDURANCE else 2
ASYNC_KILLS = 300 if ENDURANCE else 2


def doomed(save, victim: int, moment: float):
    """Return a `save` in which rank `victim` is killed the second time, at `moment`.

    `moment` is between 0, when it begins, and 1, when it would have ended.
    """
    counted = []

    def to_the_death(*args, **options):
        if dist.get_rank() != victim:
            return save(*args, **options)
        seen, limit = 0, moment * counted[-1] if counted else math.inf

        def count(*_):
            nonlocal seen
            seen += 1
            if seen > limit:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        try:
            return save(*args, **options)
        finally:
            sys.setprofile(None)
            counted.append(seen)

    return to_the_death


def train_and_die(folder, steps, layout, victim=-1, moment=0.0, write=None):
    checkpoint.write_whole = write or checkpoint.write_whole
    if victim >= 0:
        name = "_write" if layout.get("save") == "async" else "save"
        setattr(Checkpoints, name, doomed(getattr(Checkpoints, name), victim, moment))
    return train(steps, **RUN, **layout, checkpoint=folder)


def save_and_die(folder, steps, victim=-1, moment=0.0, save=None):
    """Train with shards that each rank writes itself."""
    save = save or sharded_checkpoint.save
    torch.manual_seed(0)
    model = FullyShardedDataParallel(build_gpt(GPT, seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    folder.mkdir(exist_ok=True)
    done = 0
    if any(folder.glob("0*")):
        sharded_checkpoint.load(folder, model, optimizer)
        states = (s["step"] for s in optimizer.state.values() if "step" in s)
        done = torch.tensor(int(next(states, 0)))
        dist.all_reduce(done, op=dist.ReduceOp.MAX)
    if victim >= 0:
        save = doomed(save, victim, moment)
    for step in range(int(done), steps):
        batch = torch.Generator().manual_seed(step)
        x, y = torch.randint(96, (2, 4, 8), generator=batch)
        optimizer.zero_grad()
        model(x, y)[1].backward()
        optimizer.step()
        save(folder, model, optimizer)
    return full_state_dict(model), int(done)


def killed_in_a_row(fn, folder, steps, ranks, *args, kills=KILLS, seed=0):
    """Start `fn` again and again, kill a rank in a save, and let the last one end."""
    writers = 1 if {"save": "async"} in args else ranks  # the thread is rank 0's
    chance, killed, launches = random.Random(seed), 0, 0
    while killed < kills and launches < 2 * kills:
        launches += 1
        doom = chance.randrange(writers), chance.random() ** 0.5  # writing comes late
        reports = spawn(
            fn, folder, steps, *args, *doom, world_size=ranks, check=False, timeout=600
        )
        killed += any(report.status == "killed" for report in reports)
    assert killed == kills, reports
    return spawn(fn, folder, steps, *args, world_size=ranks, timeout=600)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_whose_saves_were_killed_has_the_curve_of_one_that_was_not(
    name, tmp_path, record_property
):
    ranks, layout = LAYOUTS[name]
    kills = ASYNC_KILLS if name == "async" else KILLS
    steps = 2 * kills + 2
    whole, *_ = spawn(train_and_die, None, steps, layout, world_size=ranks)
    last, *_ = killed_in_a_row(
        train_and_die, tmp_path / "a", steps, ranks, layout, kills=kills, seed=len(name)
    )
    assert (last.losses, last.checksum) == (whole.losses, whole.checksum)
    assert last.resumed_at >= kills  # every launch has come further
    record_property("kills", kills)


@pytest.mark.skipif(not ENDURANCE, reason="test_sharded_checkpoint.py kills one save")
def test_a_run_whose_sharded_saves_were_killed_has_the_weights_of_one_that_was_not(
    tmp_path, record_property
):
    steps = 2 * KILLS + 2
    whole, *_ = spawn(save_and_die, tmp_path / "whole", steps, world_size=2)
    last, *_ = killed_in_a_row(save_and_die, tmp_path / "killed", steps, 2)
    assert last[1] >= KILLS
    record_property("kills", KILLS)
    assert all(torch.equal(last[0][name], value) for name, value in whole[0].items())


def in_place(state: object, path: Path) -> None:
    """How a checkpoint is usually written: under its own name, and slowly."""
    torch.save(state, whole := io.BytesIO())
    with path.open("wb") as file:
        file.write(whole.getvalue()[:5000])
        for _ in range(5000):
            file.flush()
        file.write(whole.getvalue()[5000:])


def test_a_save_in_place_is_caught(tmp_path):
    args, ranks = (tmp_path, 6, LAYOUTS["ddp"][1]), LAYOUTS["ddp"][0]
    doom = 0, 0.9, in_place  # rank 0, while it writes
    spawn(train_and_die, *args, *doom, world_size=ranks, check=False, timeout=600)
    with pytest.raises(RankError, match="step-00000002.pt cannot be read"):
        spawn(train_and_die, *args, world_size=ranks, timeout=600)
