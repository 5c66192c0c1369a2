"""The exercises of chapter 00."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch00_start_here import solutions
from ddp_course.lab.answers import Answer, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect

ROWS = 12


@exercise("my_slice", solution=solutions.my_slice)
def check_my_slice(answer: Answer) -> str:
    """`my_slice(batch, rank, world_size)`: the rows of `batch` that are this rank's."""
    batch = torch.arange(ROWS).repeat_interleave(2).reshape(ROWS, 2)  # row i: (i, i)
    for world_size in (4, 3, 2, 1, 6):
        slices = [answer(batch, rank, world_size) for rank in range(world_size)]
        _judge(slices)
    _judge(on_ranks(_slice, answer, batch, world_size=4))
    return (
        f"1, 2, 3, 4 and 6 ranks share {ROWS} rows, each row once and in order; "
        "so do 4 real ranks"
    )


def _slice(my_slice: Callable, batch: Tensor) -> Tensor:
    """On every rank: take the slice."""
    return my_slice(batch, dist.get_rank(), dist.get_world_size())


def _judge(slices: list[Any]) -> None:
    """Look at what each rank got: a tensor, of whole rows, as many, the right ones."""
    each = ROWS // len(slices)
    taken: set[int] = set()
    for rank, got in enumerate(slices):
        who = f"A batch of {ROWS} rows, world_size {len(slices)}: rank {rank} got"
        expect(
            isinstance(got, Tensor),
            f"{who} `{one_line(got)}`; expected a tensor, a slice of `batch`.",
        )
        expect(
            got.dim() == 2 and got.shape[1] == 2,
            f"{who} a tensor of shape {tuple(got.shape)}; expected ({each}, 2): whole "
            "rows of `batch`, so all of dim 1 and a part of dim 0.",
        )
        rows = got[:, 0].tolist()
        expect(
            len(rows) == each,
            f"{who} {len(rows)} rows; expected {each}: all ranks have as many.",
        )
        twice = sorted(taken.intersection(rows))
        expect(
            not twice,
            f"{who} rows {rows}, but a lower rank has row {twice[:1]} already: a row "
            "that two ranks use counts twice in the average.",
        )
        wanted = list(range(rank * each, (rank + 1) * each))
        expect(
            rows == wanted and got[:, 1].tolist() == wanted,
            f"{who} rows {rows}; expected {wanted}: the slices of rank 0, 1, 2 and so "
            "on, one after another, are the batch.",
        )
        taken.update(rows)


@exercise("my_average", solution=solutions.my_average)
def check_my_average(answer: Answer) -> str:
    """`my_average(tensor)`, on every rank: the mean over all ranks, in place."""
    hint = "Every rank must take part in the same collectives, in the same order."
    for world_size in (4, 3, 2, 1):
        told = on_ranks(_averaged, answer, world_size=world_size, hint=hint)
        start = [[1.0 + rank, 60.0 * rank] for rank in range(world_size)]
        mean = [sum(column) / world_size for column in zip(*start, strict=True)]
        where = f"With {world_size} ranks that hold {start},"
        for rank, got in enumerate(told):
            expect(
                got != [sum(column) for column in zip(*start, strict=True)]
                or world_size == 1,
                f"{where} rank {rank} has {got} afterwards. That is the sum; the mean "
                f"is {mean}. If you divided, do it in place, as `tensor /= ...` does: "
                "a new tensor is lost.",
            )
            expect(
                got == mean,
                f"{where} rank {rank} has {got} afterwards; expected {mean}. It must "
                "be in the tensor that your function was given, on every rank.",
            )
    return "1, 2, 3 and 4 real ranks have the mean, each in its own tensor"


def _averaged(my_average: Callable) -> list[float]:
    """On every rank: average something that is different everywhere."""
    rank = dist.get_rank()
    tensor = torch.tensor([1.0 + rank, 60.0 * rank])
    my_average(tensor)
    return [round(number, 3) for number in tensor.tolist()]
