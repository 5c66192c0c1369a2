"""Hogwild: no server, no messages, no lock; everybody writes into the same weights.

Two ranks that change a number at once may lose one of the two changes. If each step
touches few of many numbers that is rare; the paper is about such sparse problems. Of
dense ones more is lost, and training goes on all the same. Within one machine only.

Source: Recht et al. 2011, arXiv:1106.5730. Chapter 13.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import allocator, communicator
from ddp_course.parameter_server.record import Row


def hogwild(
    params: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
) -> Tensor:
    """Let all ranks of a machine have the same parameters, with the values of rank 0.

    Every rank then trains as if alone, with an optimizer of its own: a step in place is
    a step for all. Returns the row of weights. Called by all ranks together; raises
    OSError if they can share no memory. Chapter 13.
    """
    row, comm = Row(params), communicator(group)
    memory = allocator.allocate(row.weights.nbytes, comm.rank, comm.exchange)
    weights = memory.view(row.weights.dtype)
    if comm.rank == 0:
        weights.copy_(row.weights)
    comm.exchange("written")
    row.lie_in(weights, row.gradient)
    return weights
