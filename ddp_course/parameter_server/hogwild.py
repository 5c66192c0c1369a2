"""Hogwild: no server, no messages, no lock; everybody writes into the same weights.

Two ranks that change a number at once may lose one of the two changes. If each step
touches few of many numbers that is rare; the paper is about such sparse problems. In
dense ones more is lost, and training works all the same. Within one machine only.

Source: Recht et al. 2011, arXiv:1106.5730. Chapter 13.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.parameter_server.row import Row

MEMORY = Path("/dev/shm")  # a folder whose files are in memory, on Linux


def hogwild(
    params: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Let all ranks of a machine share the same parameters, with the values of rank 0.

    Every rank then trains as if alone, with an optimizer of its own: a step in place is
    a step for all. Returns the row of weights. Called by all ranks together; raises
    FileNotFoundError on ranks of another machine. Chapter 13.
    """
    row = Row(params)
    first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
    size, dtype = row.weights.numel(), row.weights.dtype
    with tempfile.NamedTemporaryFile(dir=MEMORY if MEMORY.exists() else None) as file:
        file.truncate(row.weights.nbytes)
        name = [file.name]
        dist.broadcast_object_list(name, first, group)
        if not Path(name[0]).exists():
            raise FileNotFoundError(f"{name[0]}: hogwild needs ranks of one machine")
        weights = torch.from_file(name[0], shared=True, size=size, dtype=dtype)
        if dist.get_rank() == first:
            weights.copy_(row.weights)
        dist.barrier(group)  # all have opened rank 0's file before its name is removed
    row.lie_in(weights, row.gradient)
    return weights
