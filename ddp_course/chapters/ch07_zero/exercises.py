"""The exercises of chapter 07."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.chapters.ch07_zero import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer, code, on_ranks, one_line
from ddp_course.lab.exercises import (
    exercise,
    expect,
    judge,
    judge_ranks,
    living_bytes,
    shown,
    until_wrong,
)
from ddp_course.measure import ByteMeter, TorchCollectives, resident
from ddp_course.zero import ShardedGradientOptimizer, ZeroRedundancyOptimizer

# ---- my_pieces ---------------------------------------------------------------------

ROWS = (
    ([4, 2], 2),
    ([2, 6, 3, 12], 4),
    ([5, 1, 1, 7, 3], 3),
    ([1000, 3, 1], 4),
    ([7], 3),
    ([2, 1], 5),  # more ranks than elements
    ([3, 0, 4], 2),
    ([], 2),
    ([3, 4, 5], 1),
)


@exercise("my_pieces", solution=solutions.my_pieces)
def check_my_pieces(answer: Answer) -> str:
    """`my_pieces(numels, rank, world_size)`: tuples (k, first, last) that it owns."""
    for numels, world_size in ROWS:
        length = -(-sum(numels) // world_size)
        owners: dict[tuple[int, int], int] = {}
        for rank in range(world_size):
            given = list(numels)
            pieces = answer(given, rank, world_size)
            where = f"{answer.call(numels, rank, world_size)} returned "
            where += f"{code(one_line(pieces))}"
            expect(given == numels, f"{where}, and changed the list `numels`.")
            _judge_pieces(where, pieces, numels, owners, rank)
            total = sum(last - first for _, first, last in pieces)
            left = min(max(sum(numels) - rank * length, 0), length)
            expect(
                total == left,
                f"{where}, {total} elements; the row of {sum(numels)} is padded to "
                f"{world_size} shards of {length}, and {left} elements of rank "
                f"{rank}'s shard are real.",
            )
            wanted = solutions.my_pieces(numels, rank, world_size)
            expect(
                pieces == wanted,
                f"{where}; its shard is the elements {rank * length} up to "
                f"{(rank + 1) * length} of the row, one stretch without gaps, with "
                "the parameters in their order.",
            )
    return (
        f"{len(ROWS)} rows of parameters, among them one with more ranks than "
        "elements: every element has one owner, and all shards are equally long"
    )


def _judge_pieces(
    where: str,
    pieces: Any,
    numels: list[int],
    owners: dict[tuple[int, int], int],
    rank: int,
) -> None:
    """Look whether these are pieces at all, and whether nobody else owns them."""
    fine = isinstance(pieces, list) and all(
        isinstance(piece, tuple) and [type(part) for part in piece] == [int] * 3
        for piece in pieces
    )
    expect(fine, f"{where}; expected a list of tuples of three whole numbers.")
    for k, first, last in pieces:
        piece = code(f"({k}, {first}, {last})")
        expect(0 <= k < len(numels), f"{where}; there is no parameter {k}.")
        expect(first < last, f"{where}; {piece} is empty, and should not be there.")
        expect(
            first >= 0 and last <= numels[k],
            f"{where}; {piece} does not lie in parameter {k}, whose elements are 0 up "
            f"to {numels[k]}. Count from the parameter's beginning, not from the "
            "row's.",
        )
        for element in range(first, last):
            other = owners.setdefault((k, element), rank)
            twice = f"element {element} of parameter {k} belongs to rank {other}"
            expect(other == rank, f"{where}; but {twice} already.")


# ---- stored_and_sent ---------------------------------------------------------------

STEPPERS = {0: 0.0, 1: 0.9}  # states of SGD by momentum
REAL = ((23, 4, 2), (24, 3, 1), (17, 2, 4))  # numel, ranks, passes
PAPER = (
    (10**6 + 1, 64, 1, 2, 8),
    (10**6 + 1, 64, 2, 2, 8),
    (5, 1, 2, 1, 3),
    (3, 8, 2, 2, 2),
)


@exercise("stored_and_sent", solution=solutions.stored_and_sent)
def check_stored_and_sent(answer: Answer) -> str:
    """`stored_and_sent(numel, world_size, stage, states, passes)`: bytes of rank 0."""
    for numel, n, passes in REAL:
        cases = [(stage, states) for stage in (1, 2) for states in STEPPERS]
        asked = [answer(numel, n, *case, passes) for case in cases]
        real = on_ranks(_really, numel, cases, passes, world_size=n)[0]
        for case, got, wanted in zip(cases, asked, real, strict=True):
            _judge_bytes(answer, (numel, n, *case, passes), got, wanted)
    for case in PAPER:
        _judge_bytes(answer, case, answer(*case), solutions.stored_and_sent(*case))
    return (
        f"{len(REAL) * 4} real optimizers on 2 to 4 ranks, by ledger and meter, and "
        f"{len(PAPER)} larger cases on paper"
    )


def _really(numel: int, cases: list[tuple[int, int]], passes: int) -> list[tuple]:
    """On every rank: what ledger and meter say."""
    return [_one_step(numel, stage, states, passes) for stage, states in cases]


def _one_step(numel: int, stage: int, states: int, passes: int) -> tuple[int, int]:
    module = nn.Linear(numel, 1, bias=False)
    options = {"lr": 0.1, "momentum": STEPPERS[states]}
    cls = (ZeroRedundancyOptimizer, ShardedGradientOptimizer)[stage - 1]
    optimizer = cls(module.parameters(), torch.optim.SGD, **options)
    with ByteMeter() as meter:
        for number in range(passes):
            averaged = stage == 2 or number == passes - 1
            with nullcontext() if averaged else optimizer.no_sync():
                module(torch.ones(1, numel)).sum().backward()
        optimizer.step()
    return resident(module, optimizer).total, meter.total_sent


def _judge_bytes(answer: Answer, case: tuple, got: Any, wanted: tuple) -> None:
    call = answer.call(*case)
    whole = isinstance(got, tuple) and [type(part) for part in got] == [int, int]
    expect(
        whole,
        f"{call} returned {code(one_line(got))}; expected two whole numbers, "
        "(stored, sent). Divide with `//`.",
    )
    for what, mine, its, look in (
        ("stored", got[0], wanted[0], "Which of parameters, gradients and states are "
         "whole, with padding, and which are one shard?"),
        ("sent", got[1], wanted[1], "How many reduce-scatters and all-gathers does the "
         "step have, and what does each of them send?"),
    ):  # fmt: skip
        expect(
            mine == its,
            f"{call} says that {mine} bytes are {what}; measured on real ranks (or "
            f"counted likewise) are {its}. {look}",
        )


# ---- sharded_step ------------------------------------------------------------------

LR, BETA, STEPS = 0.5, 0.5, 3  # powers of two: all sums and products are exact
STEP = {
    "ours": "called `{by_torch}` of `torch.distributed`; use the two of "
    "`ddp_course.collectives`, whose bytes the meter counts.",
    "untouched": "changed `gradient`; leave it as it is.",
    "mine": "has wrong numbers: your part of `weights` is wrong. They are {weights}; "
    "one process has {right}. Is the gradient a mean? Is it your part, and is its "
    "momentum kept in place?",
    "all": "has wrong numbers: your part of `weights` is right, the other ranks' parts "
    "are not: {weights}; one process has {right}. Gather the parts after they were "
    "stepped, into `weights` itself.",
    "kept": "has an old momentum: `momentum` is not the new momentum of your part; "
    "change it in place.",
    "least": "sent {sent} bytes; 2 (N - 1) / N of the {S} bytes of `weights` are "
    "{most}, as much as DDP sends. {hint}",
    "no_more": "keeps {more} bytes from step to step, beside `weights` and your shard "
    "of the momentum: sharded in name only.",
}


@exercise("sharded_step", solution=solutions.sharded_step)
def check_sharded_step(answer: Answer) -> str:
    """`sharded_step(weights, gradient, momentum, lr, beta)`: a step of stage 1."""
    hint = (
        "Reduce-scatter the gradients into a tensor as long as `momentum`, step your "
        "part of `weights`, and gather the parts."
    )
    judge_ranks(STEP, _steps, answer, worlds=(2, 3, 1), hint=hint)
    return (
        "on 1, 2 and 3 real ranks: the weights of one process, bit for bit, 1/N of the "
        "momentum on each rank, and not a byte more than DDP sends"
    )


def _steps(sharded_step: Callable) -> list[dict[str, Any]]:
    """On every rank: some steps, each with what it should have come to."""
    return until_wrong(_each_step(sharded_step), STEP)


def _each_step(sharded_step: Callable) -> Iterator[dict[str, Any]]:
    rank, n = dist.get_rank(), dist.get_world_size()
    numel = 600 * n
    weights, momentum = torch.arange(float(numel)), torch.zeros(numel // n)
    right, velocity = weights.clone(), torch.zeros(numel)
    part = slice(rank * numel // n, (rank + 1) * numel // n)
    most = 2 * (n - 1) * weights.nbytes // n
    # What the collectives keep for themselves is there before anything is counted.
    solutions.sharded_step(weights.clone(), weights, momentum.clone(), LR, BETA)
    for number in range(STEPS):
        gradients = [_gradient(r, number, numel, n) for r in range(n)]
        mine = gradients[rank].clone()
        velocity = BETA * velocity + sum(gradients) / n
        right = right - LR * velocity
        barrier()
        before = living_bytes()
        with ByteMeter() as meter, TorchCollectives() as torchs:
            sharded_step(weights, mine, momentum, LR, BETA)
        more = living_bytes() - before
        yield {
            "case": f"in step {number + 1}",
            "ours": not torchs.calls,
            "by_torch": ", ".join(call.op for call in torchs.calls),
            "untouched": torch.equal(mine, gradients[rank]),
            "mine": torch.equal(weights[part], right[part]),
            "all": torch.equal(weights, right),
            "weights": shown(weights.tolist(), 60),
            "right": shown(right.tolist(), 60),
            "kept": torch.equal(momentum, velocity[part]),
            "least": meter.total_sent <= most,
            "sent": meter.total_sent,
            "S": weights.nbytes,
            "most": most,
            "more": more,
            "no_more": more < weights.nbytes // max(n, 2),
        }


def _gradient(rank: int, number: int, numel: int, n: int) -> Tensor:
    """Return whole numbers, too large for 16 bits, whose mean is exact; once zeros."""
    if (rank, number) == (1, 1):
        return torch.zeros(numel)
    return n * ((torch.arange(float(numel)) * (rank + 2) + number) % 1999 - 700)


# ---- clip_shards -------------------------------------------------------------------

CASES = (  # the shards of each rank, and the norm that is allowed
    ((((3.0,),), ((4.0,),)), 1.0),  # a norm of 5
    ((((1.0, 2.0), (2.0,)), (), ((4.0, 4.0, 8.0), (4.0,))), 2.0),  # 11; one has none
    ((((0.3,), (0.4,)), ((0.0, 0.0),)), 1.0),  # 0.5: small enough
    ((((0.6, 0.0),), ((0.8,),)), 0.9),  # 1, and nobody's own is too large
    ((((0.0,),), ()), 1.0),  # nothing at all
    ((((300.0, 400.0),), ((0.0,),)), 5.0),  # 500, whose square no 16 bits can hold
    ((((6.0, 8.0),),), 5.0),  # one rank
)
CLIP = {
    "one": "your function called {calls}, with {nbytes} bytes; one all_reduce of a "
    "single number is enough.",
    "norm": "it returned {norm_got}; the norm of all gradients before clipping is "
    "{norm_wanted}: the root of the sum of all squares.",
    "close": "the shards are {after} afterwards; expected {wanted}, in the same "
    "tensors. All are scaled by the same factor, and none if the norm is small enough.",
}


@exercise("clip_shards", solution=solutions.clip_shards)
def check_clip_shards(answer: Answer) -> str:
    """`clip_shards(shards, max_norm)`: scale all ranks' shards; return their norm."""
    hint = "Every rank must call one `dist.all_reduce`, one without shards, too."
    for shards, most in CASES:
        n = len(shards)
        told = on_ranks(_clip, answer, shards, most, world_size=n, hint=hint)
        lists = shown([[list(one) for one in rank] for rank in shards])
        for rank, its in enumerate(told):
            where = f"On {n} ranks with {lists}, with max_norm = {most:g}, on rank"
            judge(f"{where} {rank}:", its, CLIP)
    return (
        f"{len(CASES)} times on 1 to 3 real ranks, one of them without shards: the "
        "norm of all together, the same factor for all, and one small all-reduce"
    )


def _clip(clip_shards: Callable, shards: tuple, max_norm: float) -> dict[str, Any]:
    """On every rank: clip this rank's part of the case."""
    flat = [x for rank in shards for one in rank for x in one]
    norm = math.sqrt(sum(x * x for x in flat))
    scale, dtype = min(1.0, max_norm / (norm or 1)), torch.float32
    if max(flat) > 100:
        dtype = torch.float16
    own = shards[dist.get_rank()]  # in every second place of a tensor
    mine = [torch.tensor([one, one], dtype=dtype).T.contiguous()[:, 0] for one in own]
    given = list(mine)
    barrier()
    with ByteMeter() as meter, TorchCollectives() as torchs:
        got = clip_shards(given, max_norm)
    calls, nbytes = [c.op for c in torchs.calls], torchs.nbytes + meter.total_sent
    wanted = [[scale * x for x in one] for one in own]
    after = [shard.tolist() for shard in mine]
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    pairs = zip(sum(after, []), sum(wanted, []), strict=True)
    return {
        "one": calls == ["all_reduce"] and nbytes <= 16,
        "calls": code(", ".join(calls) or "no collective"),
        "nbytes": nbytes,
        "norm": isinstance(got, float) and math.isclose(got, norm, rel_tol=1e-4),
        "norm_got": shown(got),
        "norm_wanted": code(f"{norm:.4g}"),
        "close": all(math.isclose(x, y, rel_tol=tolerance) for x, y in pairs),
        "after": shown(after),
        "wanted": shown([[round(x, 4) for x in one] for one in wanted]),
    }
