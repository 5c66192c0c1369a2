"""A parameter server: one rank has the weights, the others compute gradients for it.

A worker pulls the weights, computes a gradient with them, pushes it, and pulls again:

    server    [weights] ------------.   .-> [step] ---------------.   .-> [step]
                      pull: weights |         push: gradient      |
    worker                          `-> [forward, backward] ----------'

The server has a thread for each worker, so that no worker waits for a slow or dead one.
One lock guards the ledger and the weights (`rules.Book` decides which worker must
wait). The server copies the weights for a worker with the lock held; otherwise a step
could change them halfway through the copy.

A single thread could receive from any rank (`naive`); gloo supports that, NCCL does
not. Here every thread knows its peer, and a server and a worker take turns: they never
send at the same time. (NCCL also allows only one thread at a time in a communicator,
which `backend="strict"` does not check.) A request is an *envelope* of three numbers:
its kind, a count, and the form of the parameters. Byte meters do not count envelopes.

Sources: Dean et al. 2012 (Downpour SGD); Li et al. 2014, "Scaling Distributed Machine
Learning with the Parameter Server". Chapter 13.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.collectives.endpoint import Endpoint
from ddp_course.parameter_server.record import Record
from ddp_course.parameter_server.row import ParameterRow
from ddp_course.parameter_server.rules import ASYNCHRONOUS, Book, Rule

PULL, PUSH, LEAVE, DONE, DIFFERS = range(5)  # kinds of envelopes
TICK = 0.1  # seconds between two checks for silent workers


class ServerGoneError(RuntimeError):
    """An error of a worker: the server has ended, or does not answer."""


class Server:
    """A server that holds the weights, and steps with the gradients of workers.

    Args:
        params: the parameters to train, as `model.parameters()`; the same, in the same
            order, on all ranks. Workers begin with this rank's values.
        optimizer: any of PyTorch's, over `params`.
        rule: which worker waits for which.
        workers: their ranks in the group; None means all ranks but this one.
        late: workers that the others need not wait for at the beginning.
        steps: the number of steps after which `Worker.pull` returns False. None means
            no end: workers leave when they like.
        version: the number of earlier steps, from a checkpoint.
        patience: seconds that a worker may be silent before it counts as lost.
        after_step: called with the new version, while all workers wait.
        group: the ranks; None means all.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        optimizer: Optimizer,
        rule: Rule = ASYNCHRONOUS,
        *,
        workers: Iterable[int] | None = None,
        late: Iterable[int] = (),
        steps: int | None = None,
        version: int = 0,
        patience: float = 60.0,
        after_step: Callable[[int], object] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.endpoint, self.envelopes = Endpoint(group), Endpoint(group, ())
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(
                f"optimizer is {optimizer!r}; it must be an optimizer of params, such "
                "as torch.optim.SGD(params, lr=0.1)"
            )
        everybody = set(range(self.endpoint.size)) - {self.endpoint.rank}
        self.workers = sorted(everybody if workers is None else workers)
        late = set(late)
        if strangers := {*self.workers, *late} - set(range(self.endpoint.size)):
            raise ValueError(
                f"workers or late has {min(strangers)}; they must be ranks of the "
                f"group, 0 to {self.endpoint.size - 1}"
            )
        self.row, self.optimizer = ParameterRow(params), optimizer
        self.form, self.patience = self.row.form, patience
        self.after_step = after_step
        self.book = Book(rule, set(self.workers) - late, steps, version)
        like = self.row.weights
        # By worker: the weights that it pulls, its gradient, the time of its last call.
        self.sent_weights = {worker: torch.empty_like(like) for worker in self.workers}
        self.gradients = {worker: torch.empty_like(like) for worker in self.workers}
        self.last_call = dict.fromkeys(self.workers, time.monotonic())
        self.changed = threading.Condition()  # its lock guards the server's state
        self.error: BaseException | None = None

    def serve(self) -> Record:
        """Serve until all workers have left; return the record of the run."""
        for worker in set(self.workers) - {self.endpoint.rank}:
            name = f"serves {worker}"
            threading.Thread(
                target=self._attend, args=(worker,), name=name, daemon=True
            ).start()
        with self.changed:
            while not self.book.empty and self.error is None:
                self.changed.wait(TICK)
                self._remove_silent_workers()
        if self.error is not None:
            raise self.error
        return Record(tuple(self.book.events))

    def _attend(self, worker: int) -> None:
        """Serve the requests of one worker until it leaves."""
        envelope = torch.zeros(3, dtype=torch.int64)
        try:
            while (kind := self.listen(worker, envelope)) != LEAVE:
                if kind == PUSH:
                    self.receive_gradient(worker)
                    self.run_locked(self.push, worker)
                else:
                    answer = DIFFERS, 0, 0
                    if envelope[2] == self.form:
                        answer = self.run_locked(self.pull, worker)
                    self.envelopes.send(torch.tensor(answer), worker).wait()
                    if answer[0] == PULL:
                        self.send_weights(worker)
            self.run_locked(self.book.remove, worker)
        except RuntimeError:  # the worker's connection is closed
            self.run_locked(self.lose, worker)

    def listen(self, worker: int, envelope: Tensor) -> int:
        """Receive a request; return its kind."""
        self.envelopes.receive(envelope, worker).wait()
        return int(envelope[0])

    def receive_gradient(self, worker: int) -> None:
        """Receive a worker's gradient."""
        self.endpoint.receive(self.gradients[worker], worker).wait()

    def send_weights(self, worker: int) -> None:
        """Send the copy of the weights to a worker."""
        self.endpoint.send(self.sent_weights[worker], worker).wait()

    def run_locked(self, act: Callable[[int], Any], worker: int) -> Any:
        """Call `act(worker)` with the lock held; step if the rule allows it; notify.

        Every request of a worker runs here.
        """
        with self.changed:
            self.last_call[worker] = math.inf  # the worker waits for us: not silent
            try:
                if worker not in self.book.clock and act != self.lose:
                    self.book.join(worker)
                answer = act(worker)
                while self.error is None and (workers := self.book.ready()):
                    self._step(workers)
            except BaseException as error:
                self.error = self.error or error  # `serve` raises it
                raise
            finally:
                self.last_call[worker] = time.monotonic()
                self.changed.notify_all()
            return answer

    def pull(self, worker: int) -> tuple[int, int, int]:
        """Wait until this worker may pull; copy the weights for it.

        Returns the answer: PULL, or DONE after the last step; the worker's clock; and
        the version of the weights.
        """
        book = self.book
        self.changed.wait_for(lambda: self.error or book.done or book.may_pull(worker))
        if self.error is not None:
            raise self.error
        if book.done:
            return DONE, book.clock[worker], book.version
        self.copy(worker)
        book.pull(worker)
        return PULL, book.clock[worker], book.version

    def copy(self, worker: int) -> None:
        """Copy the weights for a worker."""
        self.sent_weights[worker].copy_(self.row.weights)

    def push(self, worker: int) -> None:
        """Record that this worker's gradient has arrived."""
        self.book.push(worker)

    def lose(self, worker: int) -> None:
        """Continue without this worker."""
        self.book.remove(worker, "lost")

    def _step(self, workers: list[int]) -> None:
        self.apply(workers)
        self.book.step(workers)
        if self.after_step is not None:
            self.after_step(self.book.version)

    def apply(self, workers: list[int]) -> None:
        """Step the optimizer with the gradients of these workers."""
        gradients = [self.gradients[worker] for worker in workers]
        self.row.step(self.optimizer, gradients)

    def _remove_silent_workers(self) -> None:
        """Remove workers that were silent for too long, so that nobody awaits them."""
        latest = time.monotonic() - self.patience
        for worker in [*self.book.clock, *self.book.missing]:
            if self.last_call[worker] < latest:
                self.run_locked(self.lose, worker)


class Worker:
    """A worker that computes gradients for a server; at the end of `with` it leaves.

        with Worker(model.parameters()) as worker:
            while worker.pull():
                loss(model, batch(worker.clock)).backward()
                worker.push()

    Args:
        params: the same as the server's; their values are replaced.
        server: the server's rank in the group.
        patience: seconds to wait for an answer.
        group: the ranks; None means all.

    Attributes:
        clock: the number of gradients that this worker has pushed.
        version: the number of steps in this worker's weights.
        has_weights: whether it has pulled since its last push.

    Raises ValueError if `server` is this rank, or no rank of the group. `pull` and
    `push` raise ServerGoneError if the server has ended or does not answer. `pull`
    raises ValueError if the server's parameters have other shapes or types; `push`
    raises ValueError without a pull before it.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | ParameterRow,
        server: int = 0,
        *,
        patience: float = 300.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.endpoint, self.envelopes = Endpoint(group), Endpoint(group, ())
        if server not in range(self.endpoint.size):
            raise ValueError(
                f"server is {server!r}; it must be a rank of the group, 0 to "
                f"{self.endpoint.size - 1}"
            )
        if server == self.endpoint.rank:
            raise ValueError(
                f"server is {server}, which is this rank; the server cannot be its own "
                "worker: call Server(params, optimizer).serve() on this rank"
            )
        is_row = isinstance(params, ParameterRow)
        self.row = params if is_row else ParameterRow(params)
        self.server, self.patience = server, patience
        self.form = self.row.form
        self.clock = self.version = 0
        self.has_weights = False

    def pull(self) -> bool:
        """Get the weights; return False if the server needs no more gradients."""
        self.ask(PULL)
        return self.receive_weights()

    def receive_weights(self) -> bool:
        """Receive the answer to a pull, and the weights; return False if it is DONE."""
        answer = torch.zeros(3, dtype=torch.int64)
        self._wait(self.envelopes.receive(answer, self.server))
        kind, clock, version = answer.tolist()
        if kind == DIFFERS:
            raise ValueError(
                f"rank {self.endpoint.ranks[self.server]} serves other parameters than "
                f"these {len(self.row.views)} of {self.row.weights.dtype}: their "
                "number, shapes, order and types must be the same on all ranks. Build "
                "the same model everywhere"
            )
        self.clock, self.version = clock, version
        if kind == DONE:
            return False
        self.receive_row()
        self.has_weights = True
        return True

    def push(self) -> None:
        """Send the gradients."""
        gradient = self.row.collect()
        self.ask(PUSH)
        self.send_gradient(gradient)
        self.clock += 1

    def receive_row(self) -> None:
        """Receive the weights; set the gradients to zero while they arrive."""
        arriving = self.endpoint.receive(self.row.weights, self.server)
        self.row.clear()
        self._wait(arriving)

    def send_gradient(self, gradient: Tensor) -> None:
        """Send a gradient."""
        self._wait(self.endpoint.send(gradient, self.server))

    def leave(self) -> None:
        """Notify the server that this worker will send nothing more."""
        self.ask(LEAVE)

    def ask(self, kind: int, count: int = 0) -> None:
        """Send a request of this kind; `count` is the number of rows (`RowWorker`)."""
        if kind == PUSH and not self.has_weights:
            raise ValueError(
                "push without a pull before it: call pull before each push; it gets "
                "the weights that the gradient is computed with"
            )
        self.has_weights = False
        envelope = torch.tensor([kind, count, self.form])
        self._wait(self.envelopes.send(envelope, self.server))

    def _wait(self, handle: Any) -> None:
        start = time.monotonic()
        try:
            handle.wait(timedelta(seconds=self.patience))
        except RuntimeError as error:
            late = time.monotonic() - start >= self.patience
            problem = f"has not answered for {self.patience:g} s" if late else "is gone"
            rank = self.endpoint.ranks[self.server]
            raise ServerGoneError(
                f"rank {rank}, which serves the weights, {problem}"
            ) from error

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.leave()
