"""Sparse updates: send only the rows of a large embedding that a batch uses.

A batch of a recommender looks up a few thousand of many million rows. All other rows
have no gradient, and need not be pulled either. For n rows of D numbers the worker
sends n indices (8 bytes each), receives n D numbers and sends n D back. A worker never
has the whole table, and the table's length does not matter. Parameter servers are still
used for this: an all-reduce of the table would send mostly zeros. Li et al. 2014,
section 3.1. Chapter 13.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.parameter_server.central import PULL, PUSH, Server, Worker
from ddp_course.parameter_server.row import digest


class RowServer(Server):
    """A server of the rows of one table, for `RowWorker`s.

    Args:
        table: of shape (rows, D).
        optimizer: steps the table, with sparse gradients: SGD, Adagrad, SparseAdam.
        **options: the other arguments of `Server`.
    """

    def __init__(
        self, table: nn.Parameter, optimizer: Optimizer, **options: Any
    ) -> None:
        super().__init__([table], optimizer, **options)
        self.table = table
        self.form = digest((table.shape[1], str(table.dtype)))
        # worker -> the rows that it pulls; worker -> its gradients of these rows
        self.sent_weights, self.gradients = {}, {}
        self.requested: dict[int, Tensor] = {}  # worker -> indices that it asks for
        self.pulled: dict[int, Tensor] = {}  # worker -> indices of the rows that it has

    def listen(self, worker: int, envelope: Tensor) -> int:
        """Receive a request; a pull is followed by the indices of the rows."""
        kind = super().listen(worker, envelope)
        if kind == PULL:
            rows = torch.empty(int(envelope[1]), dtype=torch.int64)
            self.endpoint.receive(rows, worker).wait()
            self.requested[worker] = rows
        return kind

    def copy(self, worker: int) -> None:
        """Copy the requested rows."""
        self.pulled[worker] = self.requested[worker]
        self.sent_weights[worker] = self.table.detach()[self.pulled[worker]]

    def receive_gradient(self, worker: int) -> None:
        """Receive the gradients of the rows that the worker has pulled."""
        self.gradients[worker] = torch.empty_like(self.sent_weights[worker])
        super().receive_gradient(worker)

    def apply(self, workers: list[int]) -> None:
        """Step with the mean of the workers' gradients, as a sparse gradient."""
        rows = torch.cat([self.pulled[worker] for worker in workers])
        gradients = torch.cat([self.gradients[worker] for worker in workers])
        values = gradients / len(workers)
        with torch.sparse.check_sparse_tensor_invariants():
            size = self.table.shape
            self.table.grad = torch.sparse_coo_tensor(rows[None], values, size)
            self.optimizer.step()


class RowWorker(Worker):
    """A worker without a table: pulls the rows of a batch, and pushes their gradients.

        with RowWorker(width=16) as worker:
            while (vectors := worker.pull(indices)) is not None:
                loss(vectors).backward()
                worker.push()

    Args:
        width: the D of the table.
        server: the server's rank in the group.
        **options: the other arguments of `Worker`.
    """

    def __init__(self, width: int, server: int = 0, **options: Any) -> None:
        self.values = nn.Parameter(torch.empty(0, width))
        super().__init__([self.values], server, **options)
        self.form = digest((width, str(self.values.dtype)))

    def pull(self, indices: Tensor) -> Tensor | None:
        """Return the rows of `indices` (any shape), each sent once; None at the end.

        Raises ValueError for indices that are not int64: the server expects 8 bytes of
        each, and would wait for more.
        """
        if indices.dtype is not torch.int64:
            raise ValueError(f"indices are {indices.dtype}; they must be torch.int64")
        rows, places = indices.unique(return_inverse=True)
        self.ask(PULL, len(rows))
        self._wait(self.endpoint.send(rows, self.server))
        self.values = nn.Parameter(torch.empty(len(rows), self.values.shape[1]))
        self.row.weights = self.values.detach()
        return self.values[places] if self.receive_weights() else None

    def push(self) -> None:
        """Send the gradients of these rows."""
        self.ask(PUSH)
        self.send_gradient(self.values.grad)
        self.clock += 1
