"""Sparse updates: of a large embedding only the rows that a batch touches travel.

A batch of a recommender looks up a few thousand of many million rows. All other rows
have no gradient, and need not be pulled either. Of n rows of D numbers the worker sends
the n indices (8 bytes each), gets n D numbers and sends n D back, however long the
table is, which it never has as a whole. This is where parameter servers live on: an
all-reduce of the table would send zeros above all. Li et al. 2014, section 3.1.
Chapter 13.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.parameter_server.central import PULL, PUSH, Server, Worker
from ddp_course.parameter_server.row import digest


class RowServer(Server):
    """Serves the rows of one table to `RowWorker`s.

    Args:
        table: of shape (rows, D).
        optimizer: over it; one that takes sparse gradients: SGD, Adagrad, SparseAdam.
        **how: the other arguments of `Server`, but for a remedy.
    """

    def __init__(self, table: nn.Parameter, optimizer: Optimizer, **how: Any) -> None:
        super().__init__([table], optimizer, **how)
        self.table = table
        self.form = digest((table.shape[1], str(table.dtype)))
        self.leaving, self.arrived = {}, {}  # not the whole table for each worker
        self.asked: dict[int, Tensor] = {}  # the rows that each worker asks for
        self.given: dict[int, Tensor] = {}  # the rows that each worker has

    def listen(self, worker: int, envelope: Tensor) -> int:
        """Receive a request; with a pull come the indices of the rows."""
        what = super().listen(worker, envelope)
        if what == PULL:
            rows = torch.empty(int(envelope[1]), dtype=torch.int64)
            self.port.receive(rows, worker).wait()
            self.asked[worker] = rows
        return what

    def copy(self, worker: int) -> None:
        """Copy the rows that were asked for."""
        self.given[worker] = self.asked[worker]
        self.leaving[worker] = self.table.detach()[self.given[worker]]

    def take(self, worker: int) -> None:
        """Receive the gradients of the rows that were pulled."""
        self.arrived[worker] = torch.empty_like(self.leaving[worker])
        super().take(worker)

    def apply(self, taken: list[int]) -> None:
        """Let the optimizer take the mean; where several touched a row, their sum."""
        rows = torch.cat([self.given[worker] for worker in taken])
        values = torch.cat([self.arrived[worker] for worker in taken]) / len(taken)
        with torch.sparse.check_sparse_tensor_invariants():
            size = self.table.shape
            self.table.grad = torch.sparse_coo_tensor(rows[None], values, size)
            self.optimizer.step()


class RowWorker(Worker):
    """Pulls the rows that it needs, and pushes their gradients; has no table.

        with RowWorker(width=16) as worker:
            while (vectors := worker.pull(indices)) is not None:
                loss(vectors).backward()
                worker.push()

    Args:
        width: the D of the table.
        server: its rank in the group.
        **how: the other arguments of `Worker`.
    """

    def __init__(self, width: int, server: int = 0, **how: Any) -> None:
        self.values = nn.Parameter(torch.empty(0, width))
        super().__init__([self.values], server, **how)
        self.form = digest((width, str(self.values.dtype)))

    def pull(self, indices: Tensor) -> Tensor | None:
        """Return the rows of `indices` (any shape), each sent once; None at the end."""
        rows, places = indices.unique(return_inverse=True)
        self.ask(PULL, len(rows))
        self._wait(self.port.send(rows, self.server))
        self.values = nn.Parameter(torch.empty(len(rows), self.values.shape[1]))
        self.row.weights = self.values.detach()
        return self.values[places] if self.receive_weights() else None

    def push(self) -> None:
        """Send the gradients of these rows."""
        self.ask(PUSH)
        self.give(self.values.grad)
        self.clock += 1
