"""The exercises of chapter 14: an error memory, the largest numbers, an outer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch14_fewer_bytes import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import equal, exercise, expect, judge, judge_ranks, shown
from ddp_course.lab.hard import unchanged
from ddp_course.measure import TorchCollectives

# ---- my_memory -----------------------------------------------------------------------


def largest(tensor: Tensor) -> Tensor:
    """Keep the number that is furthest from 0; the others become 0."""
    kept = torch.zeros_like(tensor)
    where = tensor.abs().argmax()
    kept.view(-1)[where] = tensor.reshape(-1)[where]
    return kept


COMPRESSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "the largest number alone": largest,
    "rounded to whole numbers": torch.round,
    "a half of it": lambda tensor: tensor / 2,
    "nothing left": torch.zeros_like,
    "nothing lost": torch.clone,
}


@exercise("my_memory", solution=solutions.my_memory)
def check_my_memory(answer: Answer) -> str:
    """`my_memory(compress)`: a function that sends a gradient, with error feedback.

    What did `compress` hold back in the last step, and when may it travel after all?

    Keep a tensor between the calls. Add it to the gradient before you compress, and
    afterwards keep all of that sum which was not sent. Each memory is one rank's own.
    """
    for dtype in (torch.float32, torch.float64):
        for name, compress in COMPRESSORS.items():
            case = f"{name}, {str(dtype).removeprefix('torch.')}"
            _compare(case, answer, compress, dtype, ranks=1)
            _compare(f"{case}, two ranks in turns", answer, compress, dtype, ranks=2)
    return (
        f"{len(COMPRESSORS)} compressors, two types of numbers, and two ranks whose "
        "memories are not mixed up"
    )


def _compare(
    case: str, answer: Answer, compress: Callable, dtype: torch.dtype, ranks: int
) -> None:
    """Send six gradients; a rank fills the same tensor anew for each, as DDP does."""
    sends = [answer(compress) for _ in range(ranks)]
    rights = [solutions.my_memory(compress) for _ in range(ranks)]
    expect(all(map(callable, sends)), "my_memory must return a function to be called.")
    buckets = [torch.zeros(2, 3, dtype=dtype) for _ in range(ranks)]
    held, rest = ([torch.zeros_like(bucket) for bucket in buckets] for _ in "12")
    for step in range(6):
        for rank, bucket in enumerate(buckets):
            numbers = torch.arange(6).view(2, 3) * (step + 2 + rank) % 7
            bucket.copy_((numbers - 2 - rank) / 8)
            right = rights[rank](bucket)
            mistakes = {
                "has forgotten what was held back": compress(bucket),
                "takes off what it should add": compress(bucket - held[rank]),
                "has kept the rest of the last gradient alone": compress(
                    bucket + rest[rank]
                ),
                "adds it after compressing": compress(bucket) + held[rank],
            }
            with unchanged(bucket) as told:
                got = sends[rank](bucket).clone()
            where = f"{case}: in step {step} rank {rank} sent {shown(got)}; expected "
            expect(told["kept"], f"{case}: the gradient was changed; work on a copy.")
            why = "the gradient and all that was held back before, compressed together."
            if step == 0:
                why = "the compressed gradient: nothing was held back before."
            if ranks == 2:
                why += " Does each memory have a tensor of its own?"
            elif like := _mistake(got, mistakes):
                why += f" Yours {like}."
            expect(equal(got, right), f"{where}{shown(right)}, which is {why}")
            rest[rank] = bucket - right
            held[rank] = held[rank] + rest[rank]


def _mistake(got: Any, mistakes: Mapping[str, Tensor]) -> str:
    """Return which of `mistakes`, words -> what comes of it, gives `got`; or ""."""
    return next((words for words, of_it in mistakes.items() if equal(got, of_it)), "")


# ---- my_topk_mean --------------------------------------------------------------------

SHAPES = {
    "a gradient of 2 x 3 numbers": ((2, 3), torch.float32, 2),
    "a gradient of float64": ((7,), torch.float64, 3),
    "all numbers": ((5,), torch.float32, 5),
    "a gradient of zeros": ((3,), torch.float32, 1),
    "20,022 numbers": ((142, 141), torch.float32, 10),
}
TOPK = {
    "right": "returned {got}; expected {wanted}. {why}",
    "kept": "changed {changed} that it was given; work on a copy.",
    "few": "handed {nbytes} bytes to collectives; {dense} are the whole gradient. Only "
    "indices and values should travel.",
}


@exercise("my_topk_mean", solution=solutions.my_topk_mean)
def check_my_topk_mean(answer: Answer) -> str:
    """`my_topk_mean(gradient, k)`: the mean of every rank's k largest numbers.

    Every rank has chosen other places. What must be told beside the numbers themselves?

    All-gather the k places of each rank, and its k values in the same order. Begin with
    zeros, add each rank's values at its places, and divide by the number of ranks.
    """
    hint = "Every rank calls the same collectives, with tensors of the same size."
    judge_ranks(TOPK, _topk, answer, worlds=(3,), hint=hint)
    return f"{len(SHAPES)} gradients on three real ranks; indices and values travel"


def _topk(my_topk_mean: Callable) -> Iterator[dict[str, Any]]:
    """On every rank: its own gradient; multiples of 3 / 8, so that means are exact."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for case, (shape, dtype, k) in SHAPES.items():
        dice, every = torch.Generator().manual_seed(1), []
        for _ in range(n):
            size = 1 + torch.randperm(math.prod(shape), generator=dice)  # no two alike
            numbers = 3 / 8 * torch.where(size % 2 == 0, size, -size)
            every.append(numbers.to(dtype) * ("zeros" not in case))
        mine, outcomes = every[rank].view(shape), _outcomes(every, k, rank)
        right = outcomes.pop("right").view(shape)
        barrier()
        with unchanged(mine) as told, TorchCollectives() as torchs:
            got = my_topk_mean(mine, k)
        why = _mistake(got, {words: o.view(shape) for words, o in outcomes.items()})
        yield told | {
            "case": case,
            "right": equal(got, right),
            "got": shown(got),
            "wanted": shown(right),
            "why": why or "Are these each rank's largest, where *it* had them?",
            "few": mine.numel() < 1000 or torchs.nbytes < mine.nbytes / 10,
            "nbytes": torchs.nbytes,
            "dense": mine.nbytes,
        }


def _outcomes(every: Sequence[Tensor], k: int, rank: int) -> dict[str, Tensor]:
    """Return the mean of every rank's largest numbers, and what mistakes give."""
    n, mean = len(every), sum(every) / len(every)

    def put(places: list[Tensor], values: list[Tensor], add: bool = True) -> Tensor:
        where, zeros = torch.cat(places), torch.zeros_like(mean)
        return zeros.index_put_((where,), torch.cat(values) / n, accumulate=add)

    def at(places: list[Tensor]) -> list[Tensor]:
        return [x[where] for x, where in zip(every, places, strict=True)]

    places = [x.abs().topk(k).indices for x in every]
    signed, large = [x.topk(k).indices for x in every], mean.abs().topk(k).indices
    values, right = at(places), put(places, at(places))
    senders = n * put(places, [torch.ones_like(x) for x in values]).clamp(min=1 / n)
    return {
        "right": right,
        "That is the sum; is it the mean?": n * right,
        "Divide by all ranks, also by those without this place.": n * right / senders,
        "Are these the largest by size, whatever their sign?": put(signed, at(signed)),
        "The signs are lost.": put(places, [x.abs() for x in values]),
        "If two ranks send the same place, both add up.": put(places, values, False),
        "All were put where this rank had its own.": put([places[rank]], [sum(values)]),
        "These are the largest of the mean.": put([large], [n * mean[large]]),
    }


# ---- my_outer_step -------------------------------------------------------------------

OUTER = {  # the momentum first: if that is right, only the step can be wrong
    "kept": "changed {changed} of the replicas; leave them as they are.",
    "momentum": "left {has} in `momentum`; expected {wanted}: mu times the old one, "
    "and the way *back* from the mean to the common point, in the tensors themselves.",
    "common": "left {got} in `common`; expected {right}, in the tensors themselves: "
    "lr times (the gradient plus mu times the *new* momentum) from the old point.",
}


@exercise("my_outer_step", solution=solutions.my_outer_step)
def check_my_outer_step(answer: Answer) -> str:
    """`my_outer_step(common, replicas, momentum, lr, mu)`: DiLoCo's outer step.

    If you took the way that the replicas have gone for a gradient, which sign has it?

    The gradient is the common point minus the mean of the replicas. The momentum
    becomes mu times itself, plus that. Then go lr times (gradient plus mu times the new
    momentum) against it. All of it in place, for each tensor.
    """
    for lr, mu in ((1.0, 0.0), (0.5, 0.0), (1.0, 0.75), (0.5, 0.75)):
        for dtype in (torch.float32, torch.float64):
            case = f"lr {lr}, mu {mu}, {str(dtype).removeprefix('torch.')}"
            for told in _outer_steps(answer, lr, mu, dtype):
                judge(f"With {case}, round {told['round']}: your function", told, OUTER)
    return "three rounds each; with lr 1 and no momentum it is the mean of the replicas"


def _outer_steps(
    answer: Answer, lr: float, mu: float, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    shapes = (2, 2), (3,), (0,)
    common = [torch.ones(shape, dtype=dtype) for shape in shapes]
    momentum = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    right, wanted = [[t.clone() for t in ts] for ts in (common, momentum)]
    for number in range(3):
        ways = (0.25 * rank - number - 0.125 for rank in range(3))
        replicas = [[tensor + way for tensor in right] for way in ways]
        solutions.my_outer_step(right, replicas, wanted, lr, mu)
        with unchanged(*replicas) as told:
            answer([*common], replicas, [*momentum], lr, mu)  # lists of its own
        yield told | {
            "round": number,
            "common": _all_close(common, right),
            "got": shown(common[1]),
            "right": shown(right[1]),
            "momentum": _all_close(momentum, wanted),
            "has": shown(momentum[1]),
            "wanted": shown(wanted[1]),
        }


def _all_close(got: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.allclose, got, right))
