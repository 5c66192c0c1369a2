"""The exercises of chapter 13: staleness, a replay, a bound, and a server."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch13_async import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, patient
from ddp_course.lab.exercises import (
    equal,
    exercise,
    expect,
    expect_call,
    judge_ranks,
    shown,
)
from ddp_course.lab.messages import MESSAGES, PATIENCE, messages_of

Record = list[tuple[str, int]]

# ---- my_staleness --------------------------------------------------------------------


def _record(seed: int, workers: Sequence[int], pushes: int) -> Record:
    """Return a record in which workers pull, some of them again, and push at random."""
    dice, has = random.Random(seed), set()
    record: Record = []
    while pushes:
        worker = dice.choice(workers)
        what = "push" if worker in has and dice.random() < 0.7 else "pull"
        has.add(worker)
        pushes -= what == "push"
        record.append((what, worker))
    return record


RECORDS = {
    "nobody else has pushed in between": [("pull", 1), ("push", 1)],
    "worker 1 has pushed after worker 2 pulled": [
        *(("pull", 1), ("pull", 2), ("push", 1), ("push", 2)),
    ],
    "who pulls again has newer weights": [
        *(("pull", 1), ("pull", 2), ("push", 1), ("pull", 2), ("push", 2)),
    ],
    "who does not pull again keeps what it has, and its own push counts, too": [
        *(("pull", 1), ("push", 1), ("push", 1)),
    ],
    "pulls change no weights, and those of others give a worker nothing": [
        *(("pull", 3), ("pull", 1), ("pull", 2), ("push", 3), ("pull", 3), ("push", 1)),
    ],
    "each push changes the weights, whoever made it": _record(0, range(1, 13), 40),
    "nobody has pushed": [("pull", 4)],
}


@exercise("my_staleness", solution=solutions.my_staleness)
def check_my_staleness(answer: Answer) -> str:
    """`my_staleness(record)`: how many updates each gradient comes too late.

    Of what must you take note when a worker pulls, and what changes with every push?

    Count the pushes so far: that is the version of the weights. At a pull, note the
    version for this worker; at a push, the version minus what was noted.
    """
    for why, record in RECORDS.items():
        right = solutions.my_staleness(record)
        expect_call(answer, list(record), returns=right, because=why)
    return f"{len(RECORDS)} records, with up to 12 workers that pull when they like"


# ---- my_replay -----------------------------------------------------------------------

PLAYED = ((0, (1,), 3), (1, (1, 2), 6), (2, range(1, 13), 40))
LR = 0.125  # a power of two: lr times a gradient is exact, in whatever order


@exercise("my_replay", solution=solutions.my_replay)
def check_my_replay(answer: Answer) -> str:
    """`my_replay(record, weights, gradient, lr)`: the weights after it, bit by bit.

    With which weights has a worker computed what it pushes?

    At a pull, copy the weights for this worker (`clone()`: a second name for the same
    tensor changes with it); at a push, take lr times the gradient of that copy off.
    """
    for dtype in (torch.float32, torch.bfloat16):
        for seed, workers, pushes in PLAYED:
            record = _record(seed, workers, pushes)
            begin = (torch.arange(6.0) / 7 - 0.4).view(2, 3).to(dtype)
            calls: list[int] = []
            gradient = _gradients(calls)
            right = solutions.my_replay(record, begin, _gradients([]), LR)
            got = answer.pure(record, begin, gradient, LR)
            case = f"With {shown(record)} and {dtype}, your function"
            wanted = [worker for what, worker in record if what == "push"]
            expect(
                calls == wanted,
                f"{case} asked for gradients of the workers {shown(calls)}; the "
                f"record has pushes of {shown(wanted)}.",
            )
            expect(
                equal(got, right),
                f"{case} returned {shown(got)}; expected {shown(right)}. Is each "
                "gradient that of the weights which its worker has pulled last, and is "
                "lr times each taken off once, in the order of the record?",
            )
    return f"{2 * len(PLAYED)} records, two types of numbers, equal to the last bit"


def _gradients(calls: list[int]) -> Callable[[int, Tensor], Tensor]:
    """Return the gradient of workers with other data each; it notes who is asked."""

    def gradient(worker: int, weights: Tensor) -> Tensor:
        calls.append(worker)
        return (weights - worker / 3) * (1 + worker % 3)

    return gradient


# ---- my_may_begin --------------------------------------------------------------------

CLOCKS = (
    ({1: 0, 2: 0}, 1, 0, "nobody is ahead"),
    ({1: 1, 2: 0}, 1, 0, "with bound 0 nobody begins before all have ended the last"),
    ({1: 1, 2: 0}, 2, 0, "the slowest need not wait for anybody"),
    ({1: 3, 2: 0, 3: 2}, 1, 3, "a lead of 3 is allowed"),
    ({1: 4, 2: 1, 3: 0}, 1, 3, "the slowest counts, and it is 4 behind"),
    ({1: 4, 2: 1, 3: 0}, 2, 0, "worker 2 has a lead of 1, if not on all"),
    ({1: 9, 2: 9, 4: 7}, 4, 1, "the slowest need not wait for anybody"),
    ({1: 7, 2: 9, 4: 9}, 4, 1, "worker 1 is 2 behind, whatever its number"),
    ({1: 7, 3: 9, 11: 8}, 11, 1, "workers have left, and 1 is not too far behind"),
    ({1: 700, 2: 0}, 1, math.inf, "without a bound nobody waits"),
    ({5: 6}, 5, 0, "it is alone"),
)


@exercise("my_may_begin", solution=solutions.my_may_begin)
def check_my_may_begin(answer: Answer) -> str:
    """`my_may_begin(clocks, worker, bound)`: may it begin its next gradient now?

    By how much is a worker ahead, and of whom?

    Its clock minus the smallest of all clocks; that may be `bound`, and no more.
    """
    for clocks, worker, bound, because in CLOCKS:
        right = solutions.my_may_begin(clocks, worker, bound)
        expect_call(answer, dict(clocks), worker, bound, returns=right, because=because)
    return f"{len(CLOCKS)} moments; whoever left, and whoever is alone, stops nobody"


# ---- my_server -----------------------------------------------------------------------

SHAPES = {"5 numbers": (5,), "2 x 3 numbers": (2, 3)}
SLOW, TURNS = 1, 3  # rank 1 pushes once, after all others have pushed so often
SERVER = MESSAGES | {
    "in_place": "has {got} in `weights`; expected {right}. Is each gradient used once, "
    "and are the weights changed in place?",
    "answered": "got {got} after push {turn}; expected {right}: the weights after its "
    "own gradient was used.",
    "sends_whole": "sent messages to the ranks {to}; expected one answer to each push.",
}


@exercise("my_server", solution=solutions.my_server)
def check_my_server(answer: Answer) -> str:
    """`my_server(weights, lr, pushes)`: receive, update, answer, whoever comes.

    From which rank do you receive, if you cannot know who comes next?

    `dist.recv(tensor)` without a rank takes a message from any, and returns from which.
    Then update the weights in place, and send them to that rank.
    """
    hint = (
        f"Rank {SLOW} is slow: it pushes only when all others have been served "
        f"{TURNS} times."
    )
    judge_ranks(SERVER, _serve, answer, worlds=(3,), hint=hint)
    return "two workers, one of them late: every push used once, and answered at once"


def _serve(my_server: Callable) -> Iterator[dict[str, Any]]:
    """On every rank: rank 0 serves, the others push; yield what can be judged."""
    rank, n = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for case, shape in SHAPES.items():
        pushes = TURNS * (n - 2) + 1
        order = [w for w in range(1, n) if w != SLOW for _ in range(TURNS)] + [SLOW]
        right = _after([], shape)
        told = {"case": case} | dict.fromkeys(SERVER, True)
        barrier()
        if rank == 0:
            weights = right.clone()
            with messages_of() as watched:
                my_server(weights, 0.5, pushes)
            right = _after(order, shape)
            to = sorted(peer for peer, _ in watched["sent"])
            told |= watched | {"got": shown(weights), "right": shown(right), "to": to}
            told["in_place"] = equal(weights, right)
            told["sends_whole"] = to == sorted(order)
        else:
            if rank == SLOW:
                done = [f"{case}: {w} is done" for w in range(1, n) if w != SLOW]
                store.wait(done, timedelta(seconds=patient(2 * PATIENCE)))
            for turn in range(1 if rank == SLOW else TURNS):
                got, right = torch.empty(shape), _after(order, shape)
                if rank != SLOW:
                    right = _after(order[: turn + 1], shape)
                with messages_of():
                    dist.send(torch.full(shape, float(rank)), 0)
                    dist.recv(got, 0)
                if told["answered"] and not equal(got, right):
                    told |= {"turn": turn, "got": shown(got), "right": shown(right)}
                    told["answered"] = False
            store.set(f"{case}: {rank} is done", "yes")
        yield told


def _after(order: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    """Return the weights when these workers' gradients were used; all are whole."""
    return torch.full(shape, 1.5 - 0.5 * sum(order))
