"""Replay a run from its record, or simulate the record of a run.

An asynchronous run cannot be repeated: the order of the workers depends on chance. But
the server records each pull and push, and from this record `replay` computes the same
weights, bit by bit, in one process. `simulate_run` uses the same ledger to compute the
record that a server would write. Chapter 13.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.parameter_server.record import Record
from ddp_course.parameter_server.row import ParameterRow
from ddp_course.parameter_server.rules import Book, Rule

# (gradient, staleness, present weights, weights of the gradient) -> corrected gradient
Remedy = Callable[[Tensor, int, Tensor, Tensor], Tensor]


def replay(
    record: Record,
    params: Iterable[nn.Parameter],
    optimizer: Optimizer,
    gradient: Callable[[int, int], object],
    *,
    remedy: Remedy | None = None,
    after_step: Callable[[int], object] | None = None,
) -> None:
    """Repeat the training of a record in this process: the same weights, bit by bit.

    Args:
        record: the result of `Server.serve`, or of `simulate_run`.
        params: parameters with the server's initial weights; they are changed.
        optimizer: steps `params`; constructed as the server's was.
        gradient: called as `gradient(worker, clock)`; fills `grad` of the parameters,
            as that worker did with its gradient number `clock`.
        remedy: corrects each gradient before the step that uses it (`remedies`).
        after_step: called with the new version after each step.

    Chapter 13.
    """
    row = ParameterRow(params)
    pulled: dict[int, Tensor] = {}  # worker -> its weights
    pushed: dict[int, tuple[Tensor, int]] = {}  # worker -> gradient, weights' version
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
            gradients = []
            for worker in event.workers:
                one, version = pushed[worker]
                if remedy is not None:
                    age = event.version - 1 - version
                    one = remedy(one, age, row.weights, pulled[worker])
                gradients.append(one)
            row.step(optimizer, gradients)
            if after_step is not None:
                after_step(event.version)


def simulate_run(rule: Rule, seconds: Sequence[float], steps: int) -> Record:
    """Return the record of a simulated run, in which messages take no time.

    `seconds[k]` is the time that worker k + 1 needs for a gradient (rank 0 serves); the
    record ends with the last of `steps` steps, and can be replayed. Raises ValueError
    for no worker, no step or a time that is not above 0. Chapter 13.
    """
    if not seconds or min(seconds) <= 0 or steps < 1:
        raise ValueError(
            f"seconds is {seconds!r} and steps is {steps}; seconds must have a number "
            "above 0 for each worker, of one worker or more, and steps 1 or more"
        )
    now, workers = 0.0, range(1, len(seconds) + 1)
    book = Book(rule, workers, steps, now=lambda: now)
    for worker in workers:
        book.join(worker)
    asking, busy = list(workers), []
    while not book.done:
        if ready := book.ready():
            book.step(ready)
        elif pulls := [worker for worker in asking if book.may_pull(worker)]:
            book.pull(pulls[0])
            asking.remove(pulls[0])
            heapq.heappush(busy, (now + seconds[pulls[0] - 1], pulls[0]))
        else:
            now, worker = heapq.heappop(busy)
            book.push(worker)
            asking.append(worker)
    return Record(tuple(book.events))
