"""Repeat a run from its record, or work out the record of a run that never was.

Nobody can repeat an asynchronous run: who comes first is chance. But the server writes
down who pulled and pushed when, and from that `replay` computes the same weights, bit
by bit, in one process. `simulate` asks the same ledger what a server would write down.
Chapter 13.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.parameter_server.record import Record
from ddp_course.parameter_server.row import Remedy, Row
from ddp_course.parameter_server.rules import Book, Rule


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
