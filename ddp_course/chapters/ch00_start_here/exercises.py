"""The exercises of chapter 00."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch00_start_here import solutions
from ddp_course.lab.answers import Answer, on_ranks
from ddp_course.lab.exercises import equal, exercise, judge, judge_ranks, shown
from ddp_course.lab.hard import hard_tensors

ROWS = 12
SLICE = {  # property of a slice -> hint
    "tensor": "{got}; expected a tensor, a slice of `batch`.",
    "whole": "a tensor of shape {shape}; expected {expected}: whole rows of `batch`, "
    "so all of dim 1 and a part of dim 0.",
    "as_many": "{count} rows; expected {each}: all ranks have as many.",
    "once": "rows {rows}, but a lower rank has row {twice} already: a row that two "
    "ranks use counts twice in the average.",
    "right": "rows {rows}; expected {wanted}, of {dtype} as the batch: the slices of "
    "rank 0, 1, 2 and so on, one after another, are the batch.",
}


@exercise("my_slice", solution=solutions.my_slice)
def check_my_slice(answer: Answer) -> str:
    """`my_slice(batch, rank, world_size)`: the rows of `batch` that are this rank's.

    If every lower rank has as many rows as you, how many come before yours?

    A rank has the rows of the batch over the number of ranks. Your slice of dim 0
    begins after `rank` such parts, and ends one part further.
    """
    batch = torch.arange(ROWS).repeat_interleave(2).reshape(ROWS, 2)  # row i: (i, i)
    for world_size in (4, 3, 2, 1, 6):
        _judge(batch, [answer(batch, rank, world_size) for rank in range(world_size)])
    _judge(batch, on_ranks(_slice, answer, batch, world_size=4))
    rows = torch.arange(ROWS).double()
    for other in (rows + 2**-40, rows.bfloat16()[:, None, None].expand(ROWS, 2, 2)):
        _judge(other, [answer(other, rank, 3) for rank in range(3)])
    return (
        f"1, 2, 3, 4 and 6 ranks share {ROWS} rows, each row once and in order; "
        "so do 4 real ranks, and three share rows of other types and shapes"
    )


def _slice(my_slice: Callable, batch: Tensor) -> Tensor:
    return my_slice(batch, dist.get_rank(), dist.get_world_size())


def _judge(batch: Tensor, slices: list[Any]) -> None:
    """Look at what each rank got: a tensor, of whole rows, as many, the right ones."""
    each, taken = ROWS // len(slices), set()
    for rank, got in enumerate(slices):
        told = {"tensor": isinstance(got, Tensor), "got": shown(got), "each": each}
        if told["tensor"]:
            wanted, shape = batch[rank * each :][:each], tuple(got.shape)
            whole = got.dim() == batch.dim() and shape[1:] == batch.shape[1:]
            rows = [int(row.flatten()[0]) for row in got] if whole else []
            told |= {"shape": shape, "whole": whole, "dtype": batch.dtype}
            told |= {"expected": tuple(wanted.shape), "rows": rows, "count": len(rows)}
            told |= {"twice": sorted(taken & {*rows})[:1], "right": equal(got, wanted)}
            told |= {"as_many": len(rows) == each, "once": not taken & {*rows}}
            told["wanted"] = [*range(rank * each, (rank + 1) * each)]
            taken |= {*rows}
        who = f"A batch of {ROWS} rows, world_size {len(slices)}: rank {rank} got"
        judge(who, told, SLICE)


AVERAGE = {
    "no_sum": "has {got} afterwards. That is the sum; the mean is {wanted}. If you "
    "divided, do it in place, as `tensor /= ...` does: a new tensor is lost.",
    "right": "has {got} afterwards; expected {wanted}. It must be in the tensor that "
    "your function was given, on every rank.",
}


@exercise("my_average", solution=solutions.my_average)
def check_my_average(answer: Answer) -> str:
    """`my_average(tensor)`, on every rank: the mean over all ranks, in place.

    Which collective gives every rank the sum, and what makes a mean of it?

    Sum over the ranks, then divide by their number in place: an operator such as `*=`
    changes the tensor itself, `tensor = ...` only gives the name to another one.
    """
    hint = "Every rank must take part in the same collectives, in the same order."
    judge_ranks(AVERAGE, _averages, answer, worlds=(4, 3, 2, 1), hint=hint)
    return "1, 2, 3 and 4 real ranks have the mean of tensors of three types"


def _averages(my_average: Callable) -> Iterator[dict[str, Any]]:
    rank, n = dist.get_rank(), dist.get_world_size()
    of_all = (hard_tensors(r, n, but=["strided"]) for r in range(n))
    for everyones in zip(*of_all, strict=True):
        name, tensor = everyones[rank]
        total = sum(own for _, own in everyones)
        my_average(tensor)
        told = {"case": name, "got": shown(tensor), "wanted": shown(total / n)}
        told["right"] = equal(tensor, total / n)
        told["no_sum"] = told["right"] or not equal(tensor, total)
        yield told
