"""Proofs that ranks run on this machine: launch some, and check their results."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ddp_course.commands import CommandError
from ddp_course.launch import device, spawn
from ddp_course.train import History, largest_difference, train

# AdamW divides a gradient by its size, so even the smallest gradients' rounding errors
# move the weights: by about 3e-6 after 4 steps. Without communication the difference
# is 1e-3.
TOLERANCE = 1e-4


def all_reduce_rank() -> int:
    """Run on every rank: return the sum of 1, 2, ..., world_size."""
    number = torch.tensor([dist.get_rank() + 1], device=device())
    dist.all_reduce(number)
    return int(number)


def prove_all_reduce(ranks: int = 4, fn: Callable = all_reduce_rank) -> str:
    """Launch ranks that all-reduce a number each; return one line with the result.

    Raises CommandError if a rank gets a wrong sum.
    """
    started = time.monotonic()
    sums = spawn(fn, world_size=ranks, output="none")
    seconds = time.monotonic() - started
    right = ranks * (ranks + 1) // 2
    if sums != [right] * ranks:
        raise CommandError(
            f"all_reduce returned {sums} on the ranks; each must get {right}"
        )
    return (
        f"{ranks} ranks started, summed the numbers 1 to {ranks} with one all_reduce, "
        f"each got {right}, and ended: {seconds:.2f} s."
    )


def prove_training(
    ranks: int = 4, steps: int = 4, fn: Callable[..., History] = train
) -> tuple[str, str]:
    """Train the course's model on `ranks` ranks and on one process, and compare.

    Returns two lines; raises CommandError if the two models differ.
    """
    started = time.monotonic()
    work = partial(fn, steps=steps, keep_state=True)
    kind = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    many = spawn(work, world_size=ranks, output="none", device=kind)
    (one,) = spawn(work, world_size=1, init=False, output="none", device=kind)
    seconds = time.monotonic() - started
    difference = largest_difference(many[0].state, one.state)
    if [history.world_size for history in many] != [ranks] * ranks:
        raise CommandError(f"the {ranks} ranks did not find each other")
    if len({history.checksum for history in many}) > 1:
        raise CommandError(f"after {steps} steps the {ranks} ranks differ")
    if not difference <= TOLERANCE:  # also if it is nan
        raise CommandError(
            f"{ranks} processes and one do not train the same model: after {steps} "
            f"steps their weights differ by {difference:.1g}"
        )
    return (
        f"{ranks} processes trained one GPT for {steps} steps: {_losses(many[0])}.",
        f"They agree with one process: {_losses(one)}, every weight within "
        f"{difference:.1g} ({seconds:.1f} s).",
    )


def _losses(history: History) -> str:
    return f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f}"
