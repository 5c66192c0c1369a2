"""A server on every rank: each rank serves 1/N of the weights, and is a worker, too.

The link of a single server carries 2 N S bytes for one gradient of each of N workers,
where S is the size of the weights in bytes. If the row of weights is cut into N equal
shards, and each rank serves one shard, then each rank sends

    (N - 1) / N S   gradients, to the servers of the other shards
    (N - 1) / N S   weights of its own shard, to the other ranks

ZeRO-1 sends the same: pushing is a reduce-scatter, pulling an all-gather. The
difference is who waits: here, a rule decides. With a rule other than SYNCHRONOUS the
shards that a worker pulls may have different versions.

Two ranks serve each other, so their messages could cross. Each server has a process
group of its own (on NCCL, a communicator), in which a server and a worker take turns.
Chapter 13.
"""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ddp_course.collectives.endpoint import Endpoint
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.elementwise import check_elementwise
from ddp_course.parameter_server.central import PULL, Server, Worker
from ddp_course.parameter_server.record import Record
from ddp_course.parameter_server.row import ParameterRow
from ddp_course.parameter_server.rules import ASYNCHRONOUS, Rule


class ShardedServer:
    """One rank's worker and its server of 1/N of the weights.

        server = ShardedServer(model.parameters(), torch.optim.Adam, SYNCHRONOUS)
        for batch in batches:
            server.pull()
            loss(model, batch).backward()
            server.push()
        record = server.leave()

    All ranks must construct it together.

    Args:
        params: the parameters to train, of the same shapes on all ranks. Each shard
            begins with the values of the rank that serves it.
        optimizer_class: any optimizer that steps each element by itself
            (`elementwise`).
        rule: which worker waits for which, at every server.
        group: the ranks; None means all.
        server_options: arguments of `Server`: patience, after_step.
        **defaults: arguments of `optimizer_class`.

    Raises NotElementwiseError if the optimizer uses whole tensors, and ReplicaError, on
    all ranks, if the parameters' shapes differ. `pull` and `push` raise ServerGoneError
    if a server has ended or does not answer.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        optimizer_class: Callable[..., Optimizer],
        rule: Rule = ASYNCHRONOUS,
        group: dist.ProcessGroup | None = None,
        server_options: dict[str, Any] | None = None,
        **defaults: Any,
    ) -> None:
        endpoint = Endpoint(group)
        self.rank, size = endpoint.rank, endpoint.size
        self.row = agreed(partial(ParameterRow, params, multiple_of=size), group)
        shapes = [tuple(view.shape) for view in self.row.views]
        agreed(lambda: None, group, parameters=f"{shapes} of {self.row.weights.dtype}")
        device = self.row.weights.device
        check_elementwise(optimizer_class, {}, defaults, device)
        new = {"ranks": endpoint.ranks, "use_local_synchronization": True}
        groups = [dist.new_group(**new) for _ in range(size)]
        parts = self.row.parts(size)
        self.own = parts[self.rank]
        shard = nn.Parameter(self.own.weights)
        optimizer = optimizer_class([shard], **defaults)
        options = {"workers": range(size), "group": groups[self.rank]}
        options |= server_options or {}
        self.server = Server([shard], optimizer, rule, **options)
        self.server.form = self.row.form
        self.others = [
            Worker(parts[peer], peer, group=groups[peer])
            for peer in range(size)
            if peer != self.rank
        ]
        self.record: Record | None = None
        self.serving = threading.Thread(target=self._serve, daemon=True)
        self.serving.start()

    def _serve(self) -> None:
        self.record = self.server.serve()

    def pull(self) -> None:
        """Get all shards of the weights."""
        for worker in self.others:
            worker.ask(PULL)
        self.server.run_locked(self.server.pull, self.rank)
        self.own.weights.copy_(self.server.sent_weights[self.rank])
        for worker in self.others:
            worker.receive_weights()
        self.row.clear()

    def push(self) -> None:
        """Send each shard of the gradients to its server."""
        self.row.collect()
        for worker in self.others:
            worker.push()
        self.server.gradients[self.rank].copy_(self.own.gradient)
        self.server.run_locked(self.server.push, self.rank)

    def leave(self) -> Record:
        """Serve until all workers have left; return the record of this rank's shard."""
        for worker in self.others:
            worker.leave()
        self.server.run_locked(self.server.book.remove, self.rank)
        self.serving.join()
        if self.server.error is not None:
            raise self.server.error
        return self.record
