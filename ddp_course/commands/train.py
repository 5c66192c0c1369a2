"""`train`: train the course's GPT in any layout; under torchrun, be one of its ranks.

    ddp-course train --ranks 4
    ddp-course train --dp 2 --tp 2 --pp 2 --zero 1
    torchrun --nproc-per-node 4 -m ddp_course train

The first two start the ranks themselves, on this machine. In the third, torchrun starts
this command once for each rank, on one machine or many. The ranks run the same function
in both cases.
"""

from __future__ import annotations

import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    check_alone,
    check_variables,
    join,
    leave,
    report_cause_first,
    under_torchrun,
)
from ddp_course.mechanisms.agreement import agreed
from ddp_course.train import History, train

DEADLINE = 10**6  # seconds: practically no deadline
TERMINATED = 128 + signal.SIGTERM  # the exit code after SIGTERM, as in a shell


def command(args: Namespace) -> int:
    """Train, print the progress and, with --json, write the loss curve to a file."""
    settings = settings_of(args)
    if under_torchrun():
        if args.ranks is not None:
            raise CommandError(
                "--ranks cannot be used under torchrun, which sets the number of ranks "
                "(--nproc-per-node); leave it out"
            )
        _refuse(check_variables)
        return record(_one_of_torchruns_ranks)(settings, args.json)
    ranks = ranks_of(args)
    _refuse(check_alone)
    with _sigterm_exits():
        if ranks == 1:
            try:
                history = run(settings)
            except (CheckpointError, ValueError) as error:
                raise CommandError(str(error)) from None
        else:
            where = {"world_size": ranks, "output": "live", "timeout": DEADLINE}
            history = spawn(partial(run, settings), **where)[0]
    return ended(history, settings, args.json)


def _refuse(check: Callable[[], None]) -> None:
    """Raise CommandError with the words of the check's ValueError."""
    try:
        check()
    except ValueError as error:
        raise CommandError(str(error)) from None


def ended(history: History, settings: dict[str, Any], file: Path | None) -> int:
    """Write the loss curve, if all steps are done; return the exit code."""
    if history.stopped:
        return TERMINATED
    write(file, contents(history, settings))
    return 0


@contextmanager
def _sigterm_exits() -> Iterator[None]:
    """Let SIGTERM raise SystemExit; `train` and `spawn` may first delay the signal.

    Otherwise, Python would end at once, and a shell would print "Terminated".
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(settings: dict[str, Any]) -> History:
    """Train on this rank; rank 0 prints the progress and a summary."""
    history = train(**settings, on_step=Progress(settings["steps"]))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(summary(history), flush=True)
        if history.stopped:
            print(
                f"stopped by SIGTERM after step {len(history.losses)} of "
                f"{settings['steps']}, saved in {settings['checkpoint']}; the same "
                "command goes on from there",
                flush=True,
            )
    return history


def summary(history: History) -> str:
    """Return two lines: ranks, steps, loss and time; and the checksum.

    Layouts differ in rounding, so their checksums differ.
    """
    ranks = f"{history.world_size} rank{'s' * (history.world_size != 1)}"
    steps = f"{len(history.losses)} step{'s' * (len(history.losses) != 1)}"
    if history.resumed_at:
        steps += f" ({history.resumed_at} of them by an earlier run)"
    if history.losses:
        steps += f", loss {history.losses[0]:.4f} -> {history.losses[-1]:.4f}"
    seconds = f"{history.seconds:.1f} s"
    words = f"{ranks}, {steps}, {seconds}"
    return f"{words}\nchecksum of all parameters, bit by bit: {history.checksum}"


@dataclass
class Progress:
    """A callback that prints the loss after about every twentieth part of the steps."""

    steps: int

    def __call__(self, done: int, loss: float) -> None:
        """Print a line for a finished step, if one is due."""
        if done in (1, self.steps) or done % max(1, self.steps // 20) == 0:
            print(f"step {done:>{len(str(self.steps))}} of {self.steps}"
                  f"   loss {loss:.4f}", flush=True)  # fmt: skip


def contents(history: History, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the loss curve, to the last bit, and the settings, for a JSON file."""
    names = ("losses", "checksum", "world_size", "resumed_at", "seconds")
    results = {name: getattr(history, name) for name in names}
    return {**results, "torch": torch.__version__, **settings}


def _one_of_torchruns_ranks(settings: dict[str, Any], file: Path | None) -> int:
    """Join the ranks, check that they have the same options, train; return the code."""
    with report_cause_first():
        join()
        _agree(settings)
        history = run(settings)
        code = ended(history, settings, file if dist.get_rank() == 0 else None)
        leave()
    return code


def _agree(settings: dict[str, Any]) -> None:
    """Raise ReplicaError, on every rank, if two machines have different options.

    Only the folder for checkpoints may differ, since the machines' disks may.
    """
    form = {f"--{name.replace('_', '-')}": repr(v) for name, v in settings.items()}
    form["--checkpoint"] = "set" if settings["checkpoint"] else "not set"
    agreed(lambda: None, None, **form)
