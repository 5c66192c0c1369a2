"""`train`: train the course's GPT with a strategy; under torchrun, be one of its ranks.

    ddp-course train --strategy ddp --ranks 4
    ddp-course train --dp 2 --tp 2 --pp 2 --zero 1
    torchrun --nproc-per-node 4 -m ddp_course train --strategy ddp

The first two start the ranks themselves, on this machine; the third is started by
torchrun, once for each rank, on one machine or many. What the ranks do is the same
function.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_course.checkpoint import CheckpointError
from ddp_course.commands import CommandError, check_file, write
from ddp_course.launch import spawn
from ddp_course.launch.torchrun import (
    cause_first,
    check_alone,
    join,
    leave,
    under_torchrun,
)
from ddp_course.mechanisms.agreement import check_same
from ddp_course.model import PRESETS
from ddp_course.parallelize import choose_layout
from ddp_course.train import History, train

OF_TRAIN = ("steps", "batch_size", "preset", "lr", "seed", "clip")
OF_TRAIN += ("checkpoint", "every")
OF_LAYOUT = ("strategy", "replicas", "dp", "tp", "pp", "shard")
OF_LAYOUT += ("schedule", "microbatches", "precision", "compress")
OF_LAYOUT += ("local_steps", "outer", "outer_lr", "outer_momentum")
DEFAULTS = {"replicas": 4, "schedule": "1f1b", "microbatches": 4, "every": 10}
DEADLINE = 10**6  # seconds; a training ends when it is done


def command(told: Namespace) -> int:
    """Train as `told`, print how it goes and, with told.json, write what came out."""
    told.strategy = _strategy(told.strategy, told.zero)
    _check_options(told)
    settings = {name: getattr(told, name) for name in (*OF_TRAIN, *OF_LAYOUT)}
    settings |= {n: v for n, v in DEFAULTS.items() if settings[n] is None}
    check_file(told.json)
    if under_torchrun():
        if told.ranks is not None:
            raise CommandError("--ranks is for a run without torchrun, which says it")
        record(_one_of_torchruns_ranks)(settings, told.json)
        return 0
    ranks = told.ranks or prod(n or 1 for n in (told.dp, told.tp, told.pp))
    try:
        check_alone()
        layout = choose_layout(ranks, **{name: settings[name] for name in OF_LAYOUT})
        layout.check(told.steps, told.batch_size, PRESETS[told.preset])
    except ValueError as error:
        raise CommandError(str(error)) from None
    if ranks == 1 and told.strategy in ("tp", "pp"):
        raise CommandError(
            f"strategy {told.strategy!r} needs two ranks or more; say --ranks"
        )
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
    return f"{ranks}, {steps}, {seconds}, parameters {history.checksum}"


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
    check_same(form, None, None)


def _strategy(strategy: str | None, zero: int | None) -> str:
    """Return which strategy is meant; `--zero` names one, too."""
    by_stage = "ddp" if not zero else f"zero{zero}"
    if zero is not None and strategy not in (None, "ddp", "tp", "pp", by_stage):
        raise CommandError(
            f"--zero {zero} is the strategy {by_stage!r}, and --strategy says "
            f"{strategy!r}; say one of them"
        )
    return strategy or by_stage if zero is None else by_stage


def _check_options(told: Namespace) -> None:
    """Raise CommandError for an option that would have no effect."""
    pipeline = told.strategy == "pp" or (told.pp or 1) > 1
    for name, used, by in (
        ("schedule", pipeline, "a pipeline: --strategy pp, or --pp 2"),
        ("microbatches", pipeline, "a pipeline: --strategy pp, or --pp 2"),
        ("replicas", told.strategy == "dp", "--strategy dp"),
        ("shard", told.strategy == "zero3", "--zero 3"),
        ("every", told.checkpoint is not None, "--checkpoint"),
    ):
        if getattr(told, name) is not None and not used:
            raise CommandError(f"--{name} is of no use without {by}")
