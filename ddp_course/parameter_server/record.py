"""A run is data: what happened at a server, replayed, counted, or only thought out.

Nobody can repeat an asynchronous run: who comes first is chance. But the server writes
down who pulled and pushed when, and from that `replay` computes the same weights, bit
by bit, in one process. And what a server would write down can be worked out without
any: `simulate` asks the same ledger. Chapter 13.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.mechanisms.buckets import view_of
from ddp_course.parameter_server.rules import Book, Event, Rule

# A gradient, its staleness, the weights now, those that it was computed with -> what is
# taken instead of the gradient.
Remedy = Callable[[Tensor, int, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Record:
    """What happened at a server, in the order in which it happened."""

    events: tuple[Event, ...]

    def of(self, kind: str) -> list[Event]:
        """Return the events of one kind."""
        return [event for event in self.events if event.kind == kind]

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        return len(self.of("step"))

    @property
    def gradients(self) -> int:
        """Gradients in these steps."""
        return sum(len(step.taken) for step in self.of("step"))

    @property
    def seconds(self) -> float:
        """From the first pull to the last step."""
        return self.of("step")[-1].seconds - self.of("pull")[0].seconds

    def staleness(self) -> list[int]:
        """Return, of each gradient in a step, the steps between its pull and its own.

        By the versions of the server: how often a worker has computed says nothing
        about how old its weights are.
        """
        version, found = {}, []
        for event in self.events:
            if event.kind == "push":
                version[event.worker] = event.version
            found += [event.version - 1 - version[worker] for worker in event.taken]
        return found


class Row:
    """Parameters side by side, one row of weights and one of gradients; on the CPU.

    Each parameter, and its gradient, becomes a view of its part. Frozen parameters are
    left alone, and a tied one is there once. The row is as long as a multiple of
    `multiple_of`. Raises ValueError for parameters of several types, not on the CPU, or
    none at all.
    """

    def __init__(self, params: Iterable[nn.Parameter], multiple_of: int = 1) -> None:
        params = dict.fromkeys(p for p in params if p.requires_grad)
        if len(kinds := {(p.dtype, p.device.type) for p in params}) != 1:
            raise ValueError(f"params are of {len(kinds)} kinds: {kinds or 'none'}")
        if {kind for _, kind in kinds} != {"cpu"}:
            raise ValueError("params are on a GPU; a server's are on the CPU")
        dtype, numel = next(iter(params)).dtype, sum(p.numel() for p in params)
        numel += -numel % multiple_of
        self.views: dict[nn.Parameter, Tensor] = dict.fromkeys(params)
        weights, gradient = torch.zeros(2, numel, dtype=dtype)
        for parameter, view in self._places(weights):
            view.copy_(parameter.detach())
        self.lie_in(weights, gradient)

    def _places(self, row: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter and its part of a row."""
        end = 0
        for parameter in self.views:
            yield parameter, view_of(row, end, parameter)
            end += parameter.numel()

    def lie_in(self, weights: Tensor, gradient: Tensor) -> None:
        """Let the parameters be what is in these two rows."""
        self.weights, self.gradient = weights, gradient
        for parameter, view in self._places(weights):
            parameter.data = view
        self.views = dict(self._places(gradient))
        self.clear()

    def parts(self, count: int) -> list[Self]:
        """Return the row, cut into equal parts, without any parameters."""
        found = []
        for pair in zip(
            self.weights.chunk(count), self.gradient.chunk(count), strict=True
        ):
            part = copy(self)
            part.views, (part.weights, part.gradient) = {}, pair
            found.append(part)
        return found

    def clear(self) -> None:
        """Begin a new gradient."""
        self.gradient.zero_()
        for parameter, view in self.views.items():
            parameter.grad = view

    def collect(self) -> Tensor:
        """Return the gradients of all parameters; those that have none have zeros."""
        for parameter, view in self.views.items():
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        return self.gradient

    @torch.no_grad()
    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
        """Let the optimizer take the mean of some gradients, added in this order."""
        total = gradients[0]
        if len(gradients) > 1:
            total = self.gradient.copy_(total)
            for gradient in gradients[1:]:
                total += gradient
            total /= len(gradients)
        for parameter, view in self._places(total):
            parameter.grad = view
        optimizer.step()


def replay(
    record: Record,
    params: Iterable[nn.Parameter],
    optimizer: Optimizer,
    gradient: Callable[[int, int], object],
    *,
    remedy: Remedy | None = None,
    after_step: Callable[[int], object] | None = None,
) -> None:
    """Train as a record says, in this process: the same weights, bit by bit.

    Args:
        record: of a `Server`, or of `simulate`.
        params: with the weights that the server began with; they are changed.
        optimizer: over them, made as the server's was.
        gradient: called as `gradient(worker, clock)`; fills `grad` of the parameters,
            as that worker did with its gradient number `clock`.
        remedy: the server's.
        after_step: called with the version that a step has made.

    Chapter 13.
    """
    row = Row(params)
    pulled: dict[int, Tensor] = {}  # the weights that each worker has
    pushed: dict[int, tuple[Tensor, int]] = {}  # its gradient, and their version
    for event in record.events:
        if event.kind == "pull":
            pulled[event.worker] = row.weights.clone()
        elif event.kind == "push":
            now = row.weights.clone()
            row.weights.copy_(pulled[event.worker])
            row.clear()
            gradient(event.worker, event.clock)
            pushed[event.worker] = row.collect().clone(), event.version
            row.weights.copy_(now)
        elif event.kind == "step":
            taken = []
            for worker in event.taken:
                one, version = pushed[worker]
                if remedy is not None:
                    age = event.version - 1 - version
                    one = remedy(one, age, row.weights, pulled[worker])
                taken.append(one)
            row.step(optimizer, taken)
            if after_step is not None:
                after_step(event.version)


def simulate(rule: Rule, seconds: Sequence[float], steps: int) -> Record:
    """Return the record of a run that nobody has run: with messages that take no time.

    `seconds[k]` are what worker k + 1 needs for a gradient (rank 0 serves); a record
    ends with the last of `steps` steps. It can be replayed, too. Raises ValueError for
    no worker, no step or a time that is not above 0. Chapter 13.
    """
    if not seconds or min(seconds) <= 0 or steps < 1:
        raise ValueError("seconds must be above 0, of one worker or more; steps >= 1")
    late, workers = 0.0, range(1, len(seconds) + 1)
    book = Book(rule, workers, steps, now=lambda: late)
    for worker in workers:
        book.join(worker)
    asking, busy = list(workers), []
    while not book.done:
        if taken := book.ready():
            book.step(taken)
        elif pulls := [worker for worker in asking if book.may_pull(worker)]:
            book.pull(pulls[0])
            asking.remove(pulls[0])
            heapq.heappush(busy, (late + seconds[pulls[0] - 1], pulls[0]))
        else:
            late, worker = heapq.heappop(busy)
            book.push(worker)
            asking.append(worker)
    return Record(tuple(book.events))
