"""The exercises of chapter 07."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from ddp_course.lab.answers import Answer, code, on_ranks, one_line
from ddp_course.lab.ch07_steps import check_clip_shards, check_sharded_step
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.solutions import ch07 as solutions
from ddp_course.measure import ByteMeter, resident
from ddp_course.zero import ShardedGradientOptimizer, ZeroRedundancyOptimizer

__all__ = [
    "check_clip_shards",
    "check_my_pieces",
    "check_sharded_step",
    "check_stored_and_sent",
]

# ---- my_pieces ---------------------------------------------------------------------

ROWS = (
    ([4, 2], 2),
    ([2, 6, 3, 12], 4),
    ([5, 1, 1, 7, 3], 3),
    ([1000, 3, 1], 4),
    ([7], 3),
    ([2, 1], 5),  # more ranks than elements
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
PAPER = ((10**6 + 1, 64, 1, 2, 8), (10**6 + 1, 64, 2, 2, 8), (5, 1, 2, 1, 3))


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
