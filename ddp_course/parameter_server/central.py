"""A parameter server: one rank has the weights, the others compute gradients for it.

A worker pulls the weights, computes a gradient with them, pushes it, and pulls again:

    server    [weights] ------------.   .-> [step] ---------------.   .-> [step]
                      pull: weights |         push: gradient      |
    worker                          `-> [forward, backward] ----------'

The server has a thread for each worker, so that a slow or dead worker keeps no other
one waiting. One lock guards the ledger and the weights (`rules.Book` decides who must
wait for whom). A worker gets a copy made with the lock held; otherwise a step in
between would tear it, its beginning old and its end new.

A single thread could call `recv` from any rank (`naive`), which gloo has and NCCL has
not. Here every thread knows its peer, and a server and a worker take turns: neither
sends while the other one does. (NCCL also wants one thread at a time in a communicator,
which `backend="strict"` does not check.) A request is an *envelope* of three numbers:
what, how many, and the form of the parameters. Byte meters count its content only.

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

from ddp_course.collectives.port import Port
from ddp_course.parameter_server.record import Record
from ddp_course.parameter_server.row import Remedy, Row
from ddp_course.parameter_server.rules import ASYNCHRONOUS, Book, Rule

PULL, PUSH, LEAVE, DONE, DIFFERS = range(5)  # what an envelope says
TICK = 0.1  # seconds between two looks for workers that have been silent for too long


class ServerGoneError(RuntimeError):
    """The server is gone, or does not answer."""


class Server:
    """Has the weights, and steps its optimizer with the gradients that workers push.

    Args:
        params: the parameters to train, as `model.parameters()`; the same, in the same
            order, on all ranks. Workers begin with this rank's values.
        optimizer: any of PyTorch's, over `params`.
        rule: who waits for whom.
        workers: their ranks in the group; None: all ranks but this one.
        late: workers that the others need not wait for at the beginning.
        steps: how many steps to make; then workers are told to stop. None: one for
            each gradient that they push.
        version: how many steps were made before, in a checkpoint.
        patience: seconds that a worker may be silent before it counts as lost.
        remedy: returns what a step takes in place of a stale gradient (`remedies`).
        after_step: called with the new version, while all workers wait.
        group: the ranks; None are all.
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
        remedy: Remedy | None = None,
        after_step: Callable[[int], object] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.port, self.envelopes = Port(group), Port(group, ())
        everybody = set(range(self.port.size)) - {self.port.rank}
        self.workers = sorted(everybody if workers is None else workers)
        self.row, self.optimizer, self.patience = Row(params), optimizer, patience
        self.form = self.row.form
        self.remedy, self.after_step = remedy, after_step
        self.book = Book(rule, set(self.workers) - set(late), steps, version)
        like = self.row.weights
        self.leaving = {worker: torch.empty_like(like) for worker in self.workers}
        self.arrived = {worker: torch.empty_like(like) for worker in self.workers}
        self.heard = dict.fromkeys(self.workers, time.monotonic())
        self.changed = threading.Condition()  # the lock, and what wakes its waiters
        self.error: BaseException | None = None

    def serve(self) -> Record:
        """Serve until all workers have left; return what happened."""
        for worker in set(self.workers) - {self.port.rank}:
            name = f"serves {worker}"
            threading.Thread(
                target=self._attend, args=(worker,), name=name, daemon=True
            ).start()
        with self.changed:
            while not self.book.empty and self.error is None:
                self.changed.wait(TICK)
                self._strike_off_the_silent()
        if self.error is not None:
            raise self.error
        return Record(tuple(self.book.events))

    def _attend(self, worker: int) -> None:
        """Carry out the requests of one worker until it leaves."""
        envelope = torch.zeros(3, dtype=torch.int64)
        try:
            while (what := self.listen(worker, envelope)) != LEAVE:
                if what == PUSH:
                    self.take(worker)
                    self.do(self.push, worker)
                else:
                    differs = envelope[2] != self.form
                    answer = (DIFFERS, 0, 0) if differs else self.do(self.pull, worker)
                    self.envelopes.send(torch.tensor(answer), worker).wait()
                    if answer[0] == PULL:
                        self.give(worker)
            self.do(self.book.gone, worker)
        except RuntimeError:  # its connection is closed
            self.do(self.lose, worker)

    def listen(self, worker: int, envelope: Tensor) -> int:
        """Receive a request."""
        self.envelopes.receive(envelope, worker).wait()
        return int(envelope[0])

    def take(self, worker: int) -> None:
        """Receive a gradient."""
        self.port.receive(self.arrived[worker], worker).wait()

    def give(self, worker: int) -> None:
        """Send the weights that were copied."""
        self.port.send(self.leaving[worker], worker).wait()

    def do(self, act: Callable[[int], Any], worker: int) -> Any:
        """Act on a request with the lock held; then step, and wake waiting threads."""
        with self.changed:
            self.heard[worker] = math.inf  # it is our turn now
            try:
                if worker not in self.book.clock and act != self.lose:
                    self.book.join(worker)
                answer = act(worker)
                while self.error is None and (taken := self.book.ready()):
                    self._step(taken)
            except BaseException as error:
                self.error = self.error or error  # `serve` raises it
                raise
            finally:
                self.heard[worker] = time.monotonic()
                self.changed.notify_all()
            return answer

    def pull(self, worker: int) -> tuple[int, int, int]:
        """Wait until this worker may have the weights; copy them, whole, for it."""
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
        self.leaving[worker].copy_(self.row.weights)

    def push(self, worker: int) -> None:
        """Note that this worker's gradient has arrived."""
        self.book.push(worker)

    def lose(self, worker: int) -> None:
        """Go on without this worker."""
        self.book.gone(worker, "lost")

    def _step(self, taken: list[int]) -> None:
        self.apply(taken)
        self.book.step(taken)
        if self.after_step is not None:
            self.after_step(self.book.version)

    def apply(self, taken: list[int]) -> None:
        """Step the optimizer with the gradients of these workers."""
        gradients = [self.arrived[worker] for worker in taken]
        if self.remedy is not None:
            gradients = [self._remedied(worker) for worker in taken]
        self.row.step(self.optimizer, gradients)

    def _remedied(self, worker: int) -> Tensor:
        gradient, then = self.arrived[worker], self.leaving[worker]
        return self.remedy(
            gradient, self.book.staleness(worker), self.row.weights, then
        )

    def _strike_off_the_silent(self) -> None:
        """Remove workers that have been silent for too long, so that nobody waits."""
        latest = time.monotonic() - self.patience
        for worker in [*self.book.clock, *self.book.missing]:
            if self.heard[worker] < latest:
                self.do(self.lose, worker)


class Worker:
    """Computes gradients for a server. A context manager, which leaves at its end.

        with Worker(model.parameters()) as worker:
            while worker.pull():
                loss(model, batch(worker.clock)).backward()
                worker.push()

    Args:
        params: the same as the server's; their values are replaced.
        server: the server's rank in the group.
        patience: seconds to wait for an answer.
        group: the ranks; None are all.

    Attributes:
        clock: how many gradients this worker has pushed.
        version: how many steps are in this worker's weights.

    `pull` and `push` raise ServerGoneError; `pull` raises ValueError if the server's
    parameters have other shapes or types.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Row,
        server: int = 0,
        *,
        patience: float = 300.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.port, self.envelopes = Port(group), Port(group, ())
        self.row = params if isinstance(params, Row) else Row(params)
        self.server, self.patience = server, patience
        self.form = self.row.form
        self.clock = self.version = 0

    def pull(self) -> bool:
        """Get the weights; return False if the server needs no more gradients."""
        self.ask(PULL)
        return self.receive_weights()

    def receive_weights(self) -> bool:
        """Receive the answer to a pull."""
        answer = torch.zeros(3, dtype=torch.int64)
        self._wait(self.envelopes.receive(answer, self.server))
        what, clock, version = answer.tolist()
        if what == DIFFERS:
            raise ValueError(
                f"rank {self.port.ranks[self.server]} serves other parameters than "
                f"these {len(self.row.views)} of {self.row.weights.dtype}: their "
                "number, shapes, order and types must be the same on all ranks. Build "
                "the same model everywhere"
            )
        self.clock, self.version = clock, version
        if what == DONE:
            return False
        self.take()
        self.row.clear()
        return True

    def push(self) -> None:
        """Send the gradients."""
        gradient = self.row.collect()
        self.ask(PUSH)
        self.give(gradient)
        self.clock += 1

    def take(self) -> None:
        """Receive the weights."""
        self._wait(self.port.receive(self.row.weights, self.server))

    def give(self, gradient: Tensor) -> None:
        """Send a gradient."""
        self._wait(self.port.send(gradient, self.server))

    def leave(self) -> None:
        """Tell the server that nothing more will come."""
        self.ask(LEAVE)

    def ask(self, what: int, count: int = 0) -> None:
        """Send a request."""
        envelope = torch.tensor([what, count, self.form])
        self._wait(self.envelopes.send(envelope, self.server))

    def _wait(self, handle: Any) -> None:
        start = time.monotonic()
        try:
            handle.wait(timedelta(seconds=self.patience))
        except RuntimeError as error:
            late = time.monotonic() - start >= self.patience
            how = f"has not answered for {self.patience:g} s" if late else "is gone"
            who = f"rank {self.port.ranks[self.server]}, which serves the weights,"
            raise ServerGoneError(f"{who} {how}") from error

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.leave()
