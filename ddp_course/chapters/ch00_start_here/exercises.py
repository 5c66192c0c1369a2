"""The exercises of chapter 00: a rank's rows of a batch, and a mean over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch00_start_here import solutions
from ddp_course.lab.answers import Answer, on_ranks
from ddp_course.lab.exercises import equal, exercise, judge, shown
from ddp_course.lab.judge import Case, Draw, same_as, same_on_ranks
from ddp_course.lab.values import difference, equal_values

ROWS = 12
SLICE = {  # property of a slice -> hint
    "tensor": "{got}; expected a tensor, a slice of `batch`.",
    "whole": "a tensor of shape {shape}; expected {expected}: whole rows of `batch`, "
    "so all of dim 1 and a part of dim 0.",
    "as_many": "{count} rows; expected {each}: all ranks have equally many.",
    "once": "rows {rows}, but a lower rank has rows {twice} already: a row that two "
    "ranks use counts twice in the average.",
    "type": "numbers of {got_dtype}; the batch has numbers of {dtype}.",
    "right": "rows {rows}; expected {wanted}: the slices of rank 0, 1, 2 and so on, "
    "one after another, are the batch.",
    "kept": "its slice, but your function changed `batch`, which also has the other "
    "ranks' rows; leave it as it is.",
}


@exercise("my_slice", solution=solutions.my_slice)
def check_my_slice(answer: Answer) -> str:
    """`my_slice(batch, rank, world_size)`: this rank's rows of `batch`.

    If every lower rank has as many rows as you, how many come before yours?

    Divide the rows of the batch by the number of ranks: that is a part. Your slice of
    dim 0 begins after `rank` parts, and ends one part further.
    """
    batch = torch.arange(ROWS).repeat_interleave(2).reshape(ROWS, 2)  # row i: (i, i)
    for world_size in (4, 3, 2, 1, 6):
        _judge(batch, _slices(answer, batch, world_size))
    for rank, slices in enumerate(on_ranks(_slices, answer, batch, 4, world_size=4)):
        _judge(batch, slices, f"On real rank {rank}: a batch")
    same_as(answer, solutions.my_slice, _batch, exact=True)
    return (
        f"1, 2, 3, 4 and 6 ranks share {ROWS} rows, each row once and in order; "
        "so do 4 real ranks, and up to 300 ranks with batches of other dtypes"
    )


# {case: type of its numbers}; other cases draw one
KINDS = {3: torch.bool, 4: torch.float16, 5: torch.uint8}


def _batch(d: Draw) -> tuple[Tensor, int, int]:
    world_size, each = d.same.randint(1, 7), d.same.randint(0 if d.case > 9 else 1, 3)
    inside = d.same.choice([(), (1,), (5,), (2, 3)])
    rank = d.same.randrange(world_size)
    if d.case == 6:
        inside = 2, 1, 3, 2
    if d.case == 7:
        rank, world_size, each, inside = 4, 5, 14_001, ()
    if d.case == 8:
        rank, world_size, each = 299, 300, 2
    if d.case == 9:
        rank, world_size, each = 15, 22, 1  # int(15 / 22 * 22) is 14
    if d.case == 11:
        inside = 0, 3
    batch = d.tensor(
        (world_size * each, *inside), KINDS.get(d.case), strided=d.case % 2 == 0
    )
    if d.case % 2:  # a part of a larger tensor: its memory begins with another row
        batch = torch.cat([batch[-1:], batch])[1:]
    if batch.is_floating_point() and d.case > 9:
        batch[:1] = torch.inf
    return batch, rank, world_size


def _slices(my_slice: Callable, batch: Tensor, world_size: int) -> list[Any]:
    """Return (slice, whether the batch was left unchanged) for each rank."""
    slices, before = [], batch.clone()
    for rank in range(world_size):
        slices.append((my_slice(batch, rank, world_size), equal(batch, before)))
        batch.copy_(before)
    return slices


def _judge(batch: Tensor, slices: list[Any], where: str = "A batch") -> None:
    """Check each rank's slice: its type, whole rows, their number and their place."""
    each, taken = ROWS // len(slices), set()
    for rank, (got, kept) in enumerate(slices):
        facts = {"tensor": isinstance(got, Tensor), "got": shown(got), "each": each}
        facts["kept"] = kept
        if facts["tensor"]:
            wanted, shape = batch[rank * each :][:each], tuple(got.shape)
            whole = got.dim() == batch.dim() and shape[1:] == batch.shape[1:]
            rows = [int(row.flatten()[0]) for row in got] if whole else []
            facts |= {"shape": shape, "whole": whole, "dtype": batch.dtype}
            facts |= {"got_dtype": got.dtype, "type": got.dtype == batch.dtype}
            facts |= {"expected": tuple(wanted.shape), "rows": rows, "count": len(rows)}
            facts |= {"twice": sorted(taken & {*rows})[:1], "right": equal(got, wanted)}
            facts |= {"as_many": len(rows) == each, "once": not taken & {*rows}}
            facts["wanted"] = [*range(rank * each, (rank + 1) * each)]
            taken |= {*rows}
        who = f"{where} of {ROWS} rows, world_size {len(slices)}: rank {rank} got"
        judge(who, facts, SLICE)


@exercise("my_average", solution=solutions.my_average)
def check_my_average(answer: Answer) -> str:
    """`my_average(tensor)`, on every rank: the mean over all ranks, in place.

    Which collective gives every rank the sum, and what makes a mean of it?

    Sum over the ranks, then divide by their number in place: an operator such as `*=`
    changes the tensor itself; `tensor = ...` only gives its name to another tensor.
    """
    same_on_ranks(
        *(answer, solutions.my_average, _numbers),
        worlds=(3, 1, 6),
        cases=10,
        watch=["storage"],
        hints={"in_place": _wrong_mean},
        hint="Every rank must take part in the same collectives, in the same order.",
    )
    return (
        "1, 3 and 6 real ranks have the mean of tensors of four dtypes, also of "
        "tensors that are not contiguous, and of inf and nan"
    )


# case -> one of the last rank's numbers
SPECIAL = {5: -math.inf, 6: math.inf, 7: math.nan}


def _numbers(d: Draw) -> tuple[Tensor]:
    shapes = [(2, 3), (11, 13)] if d.case < 2 else [(0, 3), (), (5,), (3, 1, 2)]
    dtype = d.same.choice([torch.float32, torch.float64, torch.bfloat16])
    shape = (2, 3) if d.case > 4 else d.same.choice(shapes)
    if d.case == 3:
        shape, dtype = (257, 65), torch.float16
    tensor = d.tensor(shape, dtype, strided=d.case > 7)
    if d.case == 9:
        tensor = d.tensor((3, 2, 4), dtype).transpose(0, 2)
    # Sums of few bits are exact: then the order of summing does not matter.
    tensor = tensor % 8 if dtype.itemsize == 2 else tensor
    if d.case in SPECIAL and d.rank == d.n - 1:
        tensor[1, 2] = SPECIAL[d.case]
    return (tensor,)


def _wrong_mean(case: Case) -> str:
    got, mean, n = case.after["tensor"], case.right["tensor"], dist.get_world_size()
    found = f"has {shown(got)} afterwards; expected {shown(mean)}"
    if equal_values(got, mean * n):
        return (
            f"has {shown(got)} afterwards. That is the sum; the mean is {shown(mean)}. "
            "If you divided, do it in place, as `tensor /= ...` does: a new tensor is "
            "lost."
        )
    if not got.isfinite().eq(mean.isfinite()).all():
        return f"{found}. A mean with inf or nan on one rank is inf or nan; keep it."
    if not case.args["tensor"].is_contiguous():
        return (
            f"{found}. This tensor is not contiguous, so `flatten`, `contiguous` and "
            "others return a copy; the tensor itself must have the mean."
        )
    for divisor in range(2, n * n + 1):
        if divisor != n and mean.any() and equal_values(got * divisor, mean * n):
            return f"{found}. That is the sum, divided by {divisor} on {n} ranks."
    return (
        f"{found}{difference(got, mean)}. The mean must be in the argument `tensor` "
        "itself, on every rank."
    )
