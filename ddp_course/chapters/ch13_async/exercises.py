"""The exercises of chapter 13: staleness, a replay, a bound, and a server."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch13_async import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, patient
from ddp_course.lab.exercises import exercise, judge_ranks, shown
from ddp_course.lab.judge import Case, Draw, same_as
from ddp_course.lab.messages import MESSAGES, PATIENCE, messages_of
from ddp_course.lab.values import equal_values

Record = list[tuple[str, int]]
CASES = 60  # records for my_staleness

# ---- my_staleness --------------------------------------------------------------------


def _record(d: Draw, pushes: int | None = None) -> Record:
    """Draw a record: at random, workers pull (perhaps several times) and push.

    `pushes` is the number of pushes; None draws a number up to 40.
    """
    workers = d.own.sample(range(400), d.own.randint(1, 12))
    pushes = d.same.randint(0, 40) if pushes is None else pushes
    has, record = set(), []
    while pushes:
        worker = d.own.choice(workers)
        what = "push" if worker in has and d.own.random() < 0.7 else "pull"
        has.add(worker)
        pushes -= what == "push"
        record.append((what, worker))
    return record


RECORDS = {  # {what the record shows: record}; tried first, for the clearest hints
    "nobody else has pushed in between": [("pull", 1), ("push", 1)],
    "worker 1 has pushed after worker 2 pulled": [
        *(("pull", 1), ("pull", 2), ("push", 1), ("push", 2)),
    ],
    "a worker that pulls again has newer weights": [
        *(("pull", 1), ("pull", 2), ("push", 1), ("pull", 2), ("push", 2)),
    ],
    "a worker that does not pull keeps old weights, and its own push counts, too": [
        *(("pull", 1), ("push", 1), ("push", 1)),
    ],
    "pulls change no weights, and other workers' pulls bring this one no new ones": [
        *(("pull", 3), ("pull", 1), ("pull", 2), ("push", 3), ("pull", 3), ("push", 1)),
    ],
    "worker 0 is a worker like all others": [
        # Two objects for 300: workers are the same if their numbers are equal.
        *(("pull", 0), ("pull", 300), ("push", 0), ("push", int("300"))),
    ],
    "nobody has pushed": [("pull", 4)],
    "nothing has happened": [],
}


@exercise("my_staleness", solution=solutions.my_staleness)
def check_my_staleness(answer: Answer) -> str:
    """`my_staleness(record)`: by how many updates each gradient is late.

    What must you note when a worker pulls, and what changes with every push?

    Count the pushes so far: that is the version of the weights. At a pull, note the
    version for this worker. At a push, the answer is the version minus the noted one.
    """
    named = list(RECORDS.items())

    def draw(d: Draw) -> tuple[Record]:
        if d.case < len(named):
            return (list(named[d.case][1]),)
        # The last record is as long as the chapter's: 3,000 steps.
        return (_record(d, 3000 if d.case == CASES - 1 else None),)

    def why(case: Case) -> str:
        reasons = (why for why, record in named if record == case.args["record"])
        because = next(reasons, "each push changes the weights, whoever made it")
        got, wanted = case.got, case.wanted
        as_many = isinstance(got, list) and len(got) == len(wanted)
        if as_many and all(got.count(age) == wanted.count(age) for age in {*wanted}):
            because = "the numbers are in the order of the pushes, whoever made them"
        return (
            f"returned {shown(case.got)}; expected {shown(case.wanted)}, because "
            f"{because}."
        )

    hints = {"fits": why, "right": why}
    same_as(answer, solutions.my_staleness, draw, cases=CASES, hints=hints)
    return (
        f"{CASES} records, with up to 12 workers that pull at any time, and up to "
        "3,000 pushes"
    )


# ---- my_replay -----------------------------------------------------------------------

LONG = 39  # this record of my_replay has 1,500 pushes
SHORT: list[Record] = [  # the records after it
    [],
    [("pull", 4)],
    [("pull", 0), ("pull", 1), ("push", 1), ("pull", 1), ("push", 0)],
]
REPLAYS = LONG + 1 + len(SHORT)
LR = 0.125, 0.5  # powers of two: lr times a gradient is exact, in any order
# For float64 weights: float32 cannot hold the second one, and as gradients have 24
# bits, the product is exact, too.
FINE_LR = 0.125, 0.5 + 2**-26


@dataclass(eq=False)
class Gradients:
    """The gradient function of workers with different data; it records its calls.

    Two are equal if they had the same calls, and nobody changed what they returned.
    """

    calls: list[int] = field(default_factory=list)
    # each gradient that was returned, and a copy of it
    returned: list[tuple[Tensor, Tensor]] = field(default_factory=list, repr=False)

    def __call__(self, worker: int, weights: Tensor) -> Tensor:
        """Return the gradient of `worker` at `weights`, and record the call."""
        self.calls.append(worker)
        gradient = (weights - worker / 3) * (1 + worker % 3) / 64
        gradient = gradient.float().to(weights.dtype)  # exact times FINE_LR
        self.returned.append((gradient, gradient.clone()))
        return gradient

    def __eq__(self, other: object) -> bool:
        """Compare the calls, and whether the returned gradients are unchanged."""
        if not isinstance(other, Gradients):
            return NotImplemented
        return self.calls == other.calls and self.unchanged() == other.unchanged()

    def unchanged(self) -> bool:
        """Return whether all returned gradients have kept their numbers."""
        return all(equal_values(*pair, exact=True) for pair in self.returned)


@exercise("my_replay", solution=solutions.my_replay)
def check_my_replay(answer: Answer) -> str:
    """`my_replay(record, weights, gradient, lr)`: the weights after it, bit for bit.

    With which weights has a worker computed the gradient that it pushes?

    At a pull, copy the weights for this worker (`clone()`: a second name for the same
    tensor changes with it). At a push, compute the gradient with that copy, and
    subtract lr times the gradient from the weights.
    """
    hints = {
        "in_place": wrong_calls,
        "right": "returned {got}; expected {wanted}{place}. Is each gradient computed "
        "at the weights which its worker has pulled last, and is lr times each "
        "subtracted once, in the order of the record?",
    }
    same_as(
        answer, solutions.my_replay, _replayed, cases=REPLAYS, exact=True, hints=hints
    )
    return f"{REPLAYS} records, three dtypes, equal to the last bit"


def _replayed(d: Draw) -> tuple[Record, Tensor, Gradients, float]:
    dtype = (torch.float32, torch.bfloat16, torch.float64)[d.case % 3]
    shape = d.same.choice([(2, 3), (2, 3), (5,), ()])
    weights = d.tensor(shape, torch.float32, strided=d.case > 9) / 700
    record = _record(d, 1500 if d.case == LONG else None)
    record = list(SHORT[d.case - LONG - 1]) if d.case > LONG else record
    lrs = FINE_LR if dtype == torch.float64 else LR
    return record, weights.to(dtype), Gradients(), d.same.choice(lrs)


def wrong_calls(case: Case) -> str:
    """Name the mistake: a changed gradient, or gradients of other workers."""
    calls, wanted = case.after["gradient"].calls, case.right["gradient"].calls
    if calls == wanted:
        return (
            "changed a gradient that `gradient` returned; multiply into a tensor of "
            "your own."
        )
    return (
        f"asked for gradients of the workers {shown(calls)}; the record has pushes of "
        f"{shown(wanted)}."
    )


# ---- my_may_begin --------------------------------------------------------------------

CLOCKS = (
    ({1: 0, 2: 0}, 1, 0, "nobody is ahead"),
    ({1: 1, 2: 0}, 1, 0, "with bound 0 all must end a gradient before any goes on"),
    ({1: 1, 2: 0}, 2, 0, "the slowest need not wait for anybody"),
    ({1: 3, 2: 0, 3: 2}, 1, 3, "a lead of 3 is allowed"),
    ({1: 4, 2: 1, 3: 0}, 1, 3, "the slowest counts, and it is 4 behind"),
    ({1: 4, 2: 1, 3: 0}, 2, 0, "worker 2 has a lead of 1 over worker 3"),
    ({1: 9, 2: 9, 4: 7}, 4, 1, "the slowest need not wait for anybody"),
    ({1: 7, 2: 9, 4: 9}, 4, 1, "worker 1 is 2 behind, whatever its number"),
    ({1: 7, 3: 9, 11: 8}, 11, 1, "workers have left, and 1 is not too far behind"),
    ({1: 700, 2: 0}, 1, math.inf, "without a bound nobody waits"),
    ({5: 6}, 5, 0, "the worker is alone"),
    ({1: 3_000_000_001, 2: 3_000_000_000}, 1, 0, "worker 1 is 1 ahead"),
)


@exercise("my_may_begin", solution=solutions.my_may_begin)
def check_my_may_begin(answer: Answer) -> str:
    """`my_may_begin(clocks, worker, bound)`: may `worker` begin its next gradient?

    By how much is the worker ahead, and of which other worker?

    Subtract the smallest of all clocks from the worker's clock: it may be ahead by up
    to `bound`.
    """

    def why(case: Case) -> str:
        clocks, worker, bound = case.args.values()
        reasons = (c[3] for c in CLOCKS if c[:3] == (clocks, worker, bound))
        lead = clocks[worker] - min(clocks.values())
        because = next(reasons, f"worker {worker} is {lead} ahead of the slowest")
        return (
            f"returned {shown(case.got)}; expected {shown(case.wanted)}, because "
            f"{because}."
        )

    same_as(
        *(answer, solutions.my_may_begin, _clocks),
        cases=200,
        hints={"fits": "returned {got}; expected True or False.", "right": why},
    )
    return "200 moments; a worker that has left holds up no other"


def _clocks(d: Draw) -> tuple[dict[int, int], int, float]:
    if d.case < len(CLOCKS):
        clocks, worker, bound, _ = CLOCKS[d.case]
        return dict(clocks), worker, bound
    workers = d.same.sample(range(30), d.same.randint(1, 9))
    clocks = {worker: d.own.randint(0, 8) for worker in workers}
    return (
        clocks,
        d.same.choice(workers),
        d.same.choice([0, 1, 1.5, 2, 3, 3.75, math.inf]),
    )


# ---- my_server -----------------------------------------------------------------------

SLOW, TURNS = 1, 3  # rank 1 pushes once, after the others have pushed 3 times each
SERVED = (  # shapes, types and learning rates
    ((5,), torch.float32, 0.5),
    ((2, 3), torch.float64, 0.3),  # float32 has another 0.3
    ((), torch.float32, 2.0),
    ((3,), torch.float32, 0.5),
)
IDLE = 3  # nobody pushes in this one
SERVER = MESSAGES | {
    "in_place": "has {got} in `weights`; expected {right}. Is each gradient used once, "
    "and are the weights changed in place?",
    "answered": "got {got} after push {push}; expected {right}: the weights after its "
    "own gradient was used.",
    "sends_whole": "sent messages to ranks {to}; expected one answer to each push.",
    "alike": "left `requires_grad` of `weights` changed; change only its numbers.",
    "waited": "never waits for a message that it started: `{begun}`.",
}


@exercise("my_server", solution=solutions.my_server)
def check_my_server(answer: Answer) -> str:
    """`my_server(weights, lr, pushes)`: step with each gradient, answer its worker.

    You cannot know which worker pushes next. From which rank do you receive?

    Repeat `pushes` times: over gloo `dist.recv`, called without a rank, takes a
    gradient from any rank, and returns the number of that rank. Step the weights with
    the gradient, in place, and send them to that rank.
    """
    hint = (
        "The server receives `pushes` gradients, no more and no fewer, from any rank: "
        f"rank {SLOW} pushes last, after each other rank has had {TURNS} answers. The "
        "server answers each before it receives the next, and the last one, too."
    )
    judge_ranks(SERVER, _serve, answer, worlds=(3, 2, 4), hint=hint)
    return "1 to 3 workers, one of them late: each push is used once, and answered"


def _serve(my_server: Callable) -> Iterator[dict[str, Any]]:
    """Serve on rank 0, push on the other ranks; yield the facts to judge."""
    rank, n = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for number, (shape, dtype, lr) in enumerate(SERVED):
        others = [worker for worker in range(1, n) if worker != SLOW]
        # Workers push in a fixed order, so the weights that each gets are known. Others
        # push between two pushes of a worker, and it also pushes twice in a row.
        turns = (others, others[::-1])
        order = [one for turn in range(TURNS) for one in turns[turn % 2]] + [SLOW]
        order = [] if number == IDLE else order
        after = _weights_after(number, lr, order)
        case = f"{len(order)} pushes, lr {lr:g}"
        facts = {"case": case} | dict.fromkeys(SERVER, True)
        barrier()
        if rank == 0:
            weights = after[0].clone()
            view = weights.view_as(weights)  # with the same memory
            with messages_of() as seen:
                my_server(weights, lr, len(order))
            to = sorted(peer for peer, _ in seen["sent"])
            facts |= seen | {"got": shown(view), "right": shown(after[-1]), "to": to}
            facts["in_place"] = all(
                equal_values(one, after[-1]) for one in (weights, view)
            )
            facts["alike"] = not weights.requires_grad
            facts["sends_whole"] = to == sorted(order)
        for push in (k for k, worker in enumerate(order) if worker == rank):
            if push:
                ready = [f"{number}: {push - 1} is answered"]
                store.wait(ready, timedelta(seconds=patient(2 * PATIENCE)))
            got, right = torch.empty(shape, dtype=dtype), after[push + 1]
            with messages_of():
                dist.send(_gradient(number, push), 0)
                dist.recv(got, 0)
            store.set(f"{number}: {push} is answered", "yes")
            if facts["answered"] and not equal_values(got, right):
                facts |= {"push": push, "got": shown(got), "right": shown(right)}
                facts["answered"] = False
        yield facts


def _gradient(number: int, push: int) -> Tensor:
    """Return the gradient of push `push` in SERVED[number]; all elements differ."""
    shape, dtype, _ = SERVED[number]
    return Draw(100 * number + push + 2).tensor(shape, dtype) / 64


def _weights_after(number: int, lr: float, order: Sequence[int]) -> list[Tensor]:
    """Return the weights before the first push, and after each push."""
    weights = [Draw(1000 + number).tensor(*SERVED[number][:2])]
    for push, _ in enumerate(order):
        weights.append(weights[-1] - lr * _gradient(number, push))
    return weights
