"""Functions for tests that run them under torchrun."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from ddp_course.launch import device, here


def names(factor=1):
    """Return this rank's names, and the sum of all ranks times `factor`."""
    total = torch.tensor([dist.get_rank()], device=device())
    dist.all_reduce(total)
    place = here()
    return place.rank, place.local_rank, place.node_rank, total.item() * factor


def fail_in_the_first_attempts(folder, culprit, failures):
    """Let rank `culprit` raise in the first attempts, after some communication."""
    marks = Path(folder)
    attempt = len(list(marks.glob("failed-*")))
    names()
    dist.barrier()
    if attempt < failures:
        if dist.get_rank() == culprit:
            (marks / f"failed-{attempt}").touch()
            raise ValueError("on purpose")
        names()  # the others wait for the culprit when it fails
    return attempt, names()[3], os.environ["TORCHELASTIC_RESTART_COUNT"]
