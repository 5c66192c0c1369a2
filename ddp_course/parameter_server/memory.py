"""A server and workers on one machine: tensors are not sent, as both see them.

A worker's weights and gradients lie where the server sees them. What is left of a pull
is one copy, made by the server; of a push nothing: the gradient is used where it is,
and the worker writes the next one after its next pull, when it has been. Envelopes are
still sent, and meters see no bytes. Chapter 13.
"""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import allocator, communicator
from ddp_course.parameter_server.central import Server, Worker
from ddp_course.parameter_server.record import Row


def rows_of_all(row: Row, group: dist.ProcessGroup | None) -> Tensor:
    """Return weights and gradients of every rank (ranks, 2, numbers), seen by all."""
    comm = communicator(group)
    nbytes = comm.size * 2 * row.weights.nbytes
    memory = allocator.allocate(nbytes, comm.rank, comm.exchange)
    return memory.view(row.weights.dtype).view(comm.size, 2, -1)


class MemoryServer(Server):
    """As `Server`, with the same arguments. Made by all ranks together.

    Raises OSError if they can share no memory.
    """

    def __init__(
        self, *args: Any, group: dist.ProcessGroup | None = None, **how: Any
    ) -> None:
        super().__init__(*args, group=group, **how)
        rows = rows_of_all(self.row, group)
        for worker in self.workers:
            self.leaving[worker], self.arrived[worker] = rows[worker]

    def give(self, worker: int) -> None:
        """It is there already."""

    def take(self, worker: int) -> None:
        """It is here already."""


class MemoryWorker(Worker):
    """As `Worker`, with the same arguments. Made by all ranks together.

    What it pulls is for reading: its server compares with it what has come later.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        server: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        **how: Any,
    ) -> None:
        super().__init__(params, server, group=group, **how)
        weights, gradient = rows_of_all(self.row, group)[self.port.rank]
        self.row.lie_in(weights, gradient)

    def take(self) -> None:
        """It is here already."""

    def give(self, gradient: Tensor) -> None:
        """It is there already."""
