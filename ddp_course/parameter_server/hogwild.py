"""Hogwild: no server, no messages, no lock: all ranks write into the same weights.

If two ranks change a number at the same time, one of the two changes may be lost. That
is rare if each step changes only few of many numbers; the paper is about such sparse
problems. In dense problems more changes are lost, and training still works. Hogwild
needs ranks of one machine.

Source: Recht et al. 2011, arXiv:1106.5730. Chapter 13.
"""

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.parameter_server.row import ParameterRow

MEMORY = Path("/dev/shm")  # a folder whose files are in memory, on Linux


def hogwild(
    params: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Share one set of parameters, with the values of rank 0, among a machine's ranks.

    Every rank then trains as if alone, with an optimizer of its own, whose in-place
    steps change the shared weights. Returns the row of weights. All ranks must call it;
    raises FileNotFoundError on ranks of another machine. Chapter 13.
    """
    row = ParameterRow(params)
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
    row.use_memory(weights, row.gradient)
    return weights
