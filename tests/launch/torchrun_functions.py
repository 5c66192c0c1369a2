"""Functions for tests that run them under torchrun."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.launch import device


def sum_of_ranks() -> int:
    total = torch.tensor([dist.get_rank()], device=device())
    dist.all_reduce(total)
    return total.item()


def fail_in_the_first_attempts(folder, culprit, failures):
    """Let rank `culprit` raise in the first attempts, after some communication."""
    marks = Path(folder)
    attempt = len(list(marks.glob("failed-*")))
    sum_of_ranks()
    dist.barrier()
    if attempt < failures:
        if dist.get_rank() == culprit:
            (marks / f"failed-{attempt}").touch()
            raise ValueError("on purpose")
        sum_of_ranks()  # the others wait for the culprit when it fails
    return attempt, sum_of_ranks(), os.environ["TORCHELASTIC_RESTART_COUNT"]
