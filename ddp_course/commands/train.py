"""`train`: train the course's GPT in any layout; under torchrun, be one of its ranks.

    ddp-course train --ranks 4
    ddp-course train --dp 2 --tp 2 --pp 2 --zero 1
    torchrun --nproc-per-node 4 -m ddp_course train

The first two start the ranks themselves, on this machine; the third is started by
torchrun, once for each rank, on one machine or many. What the ranks do is the same
function.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_course.checkpoint import CheckpointError
from ddp_course.commands import CommandError, write
from ddp_course.commands.train_options import ranks_of, settings_of
from ddp_course.launch import spawn
from ddp_course.launch.torchrun import (
    cause_first,
    check_alone,
    join,
    leave,
    under_torchrun,
)
from ddp_course.mechanisms.agreement import agreed
from ddp_course.train import History, train

DEADLINE = 10**6  # seconds; a training ends when it is done


def command(told: Namespace) -> int:
    """Train as `told`, print how it goes and, with told.json, write what came out."""
    settings = settings_of(told)
    if under_torchrun():
        if told.ranks is not None:
            raise CommandError("--ranks is for a run without torchrun, which says it")
        record(_one_of_torchruns_ranks)(settings, told.json)
        return 0
    ranks = ranks_of(told)
    try:
        check_alone()
    except ValueError as error:
        raise CommandError(str(error)) from None
    if ranks == 1:
        try:
            history = run(settings)
        except (CheckpointError, ValueError) as error:
            raise CommandError(str(error)) from None
    else:
        where = {"world_size": ranks, "output": "live", "timeout": DEADLINE}
        history = spawn(partial(run, settings), **where)[0]
    write(told.json, contents(history, settings))
    return 0


def run(settings: dict[str, Any]) -> History:
    """Train on this rank; rank 0 prints a line now and then, and a last one."""
    history = train(**settings, on_step=Progress(settings["steps"]))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(summary(history), flush=True)
    return history


def summary(history: History) -> str:
    """Say in a line what a training came to."""
    ranks = f"{history.world_size} rank{'s' * (history.world_size != 1)}"
    steps = f"{len(history.losses)} step{'s' * (len(history.losses) != 1)}"
    if history.resumed_at:
        steps += f" ({history.resumed_at} of them by an earlier run)"
    if history.losses:
        steps += f", loss {history.losses[0]:.4f} -> {history.losses[-1]:.4f}"
    seconds = f"{history.seconds:.1f} s"
    # Rounding differs between layouts, and so does this digest.
    words = f"{ranks}, {steps}, {seconds}"
    return f"{words}\nchecksum of all parameters, bit by bit: {history.checksum}"


@dataclass
class Progress:
    """Prints the loss after twenty to forty of all steps, if there are so many."""

    steps: int

    def __call__(self, done: int, loss: float) -> None:
        """Print a line, if it is time, for the step that is done."""
        if done in (1, self.steps) or done % max(1, self.steps // 20) == 0:
            print(f"step {done:>{len(str(self.steps))}} of {self.steps}"
                  f"   loss {loss:.4f}", flush=True)  # fmt: skip


def contents(history: History, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the loss curve, to the last bit, and what made it, for a file."""
    names = ("losses", "checksum", "world_size", "resumed_at", "seconds")
    told = {name: getattr(history, name) for name in names}
    return {**told, "torch": torch.__version__, **settings}


def _one_of_torchruns_ranks(settings: dict[str, Any], file: Path | None) -> None:
    """Meet the other ranks, see that all were told the same, and train with them."""
    with cause_first():
        join()
        _agree(settings)
        history = run(settings)
        if dist.get_rank() == 0:
            write(file, contents(history, settings))
        leave()


def _agree(settings: dict[str, Any]) -> None:
    """Raise ReplicaError, on every rank, if two machines were told different things.

    A folder for checkpoints may differ, as may the disks of two machines.
    """
    form = {f"--{name.replace('_', '-')}": repr(v) for name, v in settings.items()}
    form["--checkpoint"] = "given" if settings["checkpoint"] else "not given"
    agreed(lambda: None, None, **form)
