"""A parameter server: one rank has the weights, the others compute gradients for it.

A worker pulls the weights, computes a gradient with them, pushes it, and begins anew:

    server    [weights] ------------.   .-> [step] ---------------.   .-> [step]
                          pull: weights |         push: gradient      |
    worker                          `-> [forward, backward] ----------'

The server has a thread for each worker, so that one that is slow, or dead, keeps nobody
else waiting; and one lock, with which the ledger and the weights are changed
(`rules.Book` says who must wait for whom). What a worker gets is a copy made with the
lock held: else a step in between would tear it, its beginning old and its end new.

Two threads could also share one `recv` from any rank, which gloo has and NCCL has not.
Here everybody knows from whom a message comes, so all of it is legal for NCCL, too
(`backend="strict"`): a server and a worker take turns, and never send to each other at
once. A request is an *envelope*, two numbers; meters count what is in it, not itself.

Read with it: `rules`, who waits; `record`, `Row` and what can be done with a record.
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
from ddp_course.parameter_server.record import Record, Remedy, Row
from ddp_course.parameter_server.rules import ASYNCHRONOUS, Book, Rule

PULL, PUSH, LEAVE, DONE = range(4)  # what an envelope says
TICK = 0.1  # seconds after which the server looks who has been silent for too long


class ServerGoneError(RuntimeError):
    """A worker has no server any more, or it does not answer."""


class Server:
    """Has the weights, and steps its optimizer with the gradients that workers push.

    Args:
        params: those that are trained, as `model.parameters()`; the same, in the same
            order, on all ranks. What workers begin with is what they have here.
        optimizer: over them; any of PyTorch's.
        rule: who waits for whom.
        workers: their ranks in the group; None are all but this one.
        late: those of them that the others need not wait for at the beginning.
        steps: how many steps to make; then workers are told that they may stop. None:
            as many as they push gradients for.
        version: how many steps were made before, as of a checkpoint.
        patience: seconds that a worker may be silent; then it counts as lost.
        remedy: what is taken in place of a stale gradient (`remedies`).
        after_step: called with the version that a step has made, while all wait.
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
        self.remedy, self.after_step = remedy, after_step
        self.book = Book(rule, set(self.workers) - set(late), steps, version)
        like = self.row.weights
        self.leaving = {worker: torch.empty_like(like) for worker in self.workers}
        self.arrived = {worker: torch.empty_like(like) for worker in self.workers}
        self.heard = dict.fromkeys(self.workers, time.monotonic())
        self.changed = threading.Condition()  # the lock, and a bell
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
        """Do what one worker asks for, one after the other, until it leaves."""
        envelope = torch.zeros(3, dtype=torch.int64)
        try:
            while (what := self.listen(worker, envelope)) != LEAVE:
                if what == PUSH:
                    self.take(worker)
                    self.do(self.push, worker)
                else:
                    answer = self.do(self.pull, worker)
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
        """Act on a request with the lock held; then step, and wake all who wait."""
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
        """Copy what a worker gets."""
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
        """Let nobody wait for a worker that has said nothing for too long."""
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
        server: its rank in the group.
        patience: seconds to wait for it.
        group: the ranks; None are all.

    Attributes:
        clock: how many gradients it has pushed.
        version: how many steps there are in the weights that it has.

    `pull` and `push` raise ServerGoneError.
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
        self.clock = self.version = 0

    def pull(self) -> bool:
        """Get the weights; False, and nothing, if the server needs no gradient more."""
        self.ask(PULL)
        return self.receive_weights()

    def receive_weights(self) -> bool:
        """Receive the answer to a pull."""
        answer = torch.zeros(3, dtype=torch.int64)
        self._wait(self.envelopes.receive(answer, self.server))
        what, self.clock, self.version = answer.tolist()
        if what == DONE:
            return False
        self.take()
        self.row.clear()
        return True

    def push(self) -> None:
        """Send the gradients off."""
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
        envelope = torch.tensor([what, count, 0])
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
