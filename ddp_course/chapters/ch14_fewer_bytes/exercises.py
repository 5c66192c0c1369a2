"""The exercises of chapter 14: an error memory, the largest numbers, an outer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch14_fewer_bytes import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import (
    equal,
    exercise,
    expect,
    judge,
    judge_ranks,
    shown,
)
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
    for step in range(6):
        for rank, bucket in enumerate(buckets):
            numbers = torch.arange(6).view(2, 3) * (step + 2 + rank) % 7
            bucket.copy_((numbers - 2 - rank) / 8)
            forgetful, right = compress(bucket), rights[rank](bucket)
            with unchanged(bucket) as told:
                got = sends[rank](bucket).clone()
            where = f"{case}: in step {step} rank {rank} sent {shown(got)}; expected "
            expect(told["kept"], f"{case}: the gradient was changed; work on a copy.")
            why = "the gradient and all that was held back before, compressed together."
            if step == 0:
                why = "the compressed gradient: nothing was held back before."
            if ranks == 2:
                why += " Does each memory have a tensor of its own?"
            elif equal(got, forgetful):
                why += " Yours has forgotten what was held back."
            expect(equal(got, right), f"{where}{shown(right)}, which is {why}")


# ---- my_topk_mean --------------------------------------------------------------------

SHAPES = {
    "a gradient of 2 x 3 numbers": ((2, 3), torch.float32, 2),
    "a gradient of float64": ((7,), torch.float64, 3),
    "all numbers": ((5,), torch.float32, 5),
    "a gradient of zeros": ((3,), torch.float32, 1),
    "20,022 numbers": ((142, 141), torch.float32, 10),
}
TOPK = {
    "right": "returned {got}; expected {wanted}. Are a rank's numbers its largest by "
    "size, whatever their sign, does each go where *its* rank had it, do those in the "
    "same place add up, and is it the mean?",
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
        dice, total = torch.Generator().manual_seed(1), torch.zeros(shape, dtype=dtype)
        for each in range(n):
            size = 1 + torch.randperm(total.numel(), generator=dice)  # no two alike
            numbers = 3 / 8 * torch.where(size % 2 == 0, size, -size)
            numbers = numbers.to(dtype) * ("zeros" not in case)
            places = numbers.abs().topk(k).indices
            total.view(-1)[places] += numbers[places]
            if each == rank:
                mine = numbers.view(shape)
        barrier()
        with unchanged(mine) as told, TorchCollectives() as torchs:
            got = my_topk_mean(mine, k)
        yield told | {
            "case": case,
            "right": equal(got, total / n),
            "got": shown(got),
            "wanted": shown(total / n),
            "few": total.numel() < 1000 or torchs.nbytes < total.nbytes / 10,
            "nbytes": torchs.nbytes,
            "dense": total.nbytes,
        }


# ---- my_outer_step -------------------------------------------------------------------

OUTER = {
    "common": "left {got} in `common`; expected {right}. Which way is it from the "
    "common point to the mean, and which momentum does Nesterov's step take?",
    "momentum": "left {has} in `momentum`; expected {wanted}: mu times the old one, "
    "and the way *back* from the mean.",
    "kept": "changed {changed} of the replicas; leave them as they are.",
}


@exercise("my_outer_step", solution=solutions.my_outer_step)
def check_my_outer_step(answer: Answer) -> str:
    """`my_outer_step(common, replicas, momentum, lr, mu)`: DiLoCo's outer step.

    If you took the way that the replicas have gone for a gradient, which sign has it?

    The gradient is the common point minus the mean of the replicas. The momentum
    becomes mu times itself, plus that. Then go lr times (gradient plus mu times the new
    momentum) against it. All of it in place, for each tensor.
    """
    for lr, mu in ((1.0, 0.0), (0.7, 0.0), (1.0, 0.9), (0.7, 0.9)):
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
        ways = (0.25 * rank - number - 0.1 for rank in range(3))
        replicas = [[tensor + way for tensor in right] for way in ways]
        solutions.my_outer_step(right, replicas, wanted, lr, mu)
        with unchanged(*replicas) as told:
            answer(common, replicas, momentum, lr, mu)
        yield told | {
            "round": number,
            "common": _all_close(common, right),
            "got": shown([t.tolist() for t in common]),
            "right": shown([t.tolist() for t in right]),
            "momentum": _all_close(momentum, wanted),
            "has": shown([t.tolist() for t in momentum]),
            "wanted": shown([t.tolist() for t in wanted]),
        }


def _all_close(got: list[Tensor], right: list[Tensor]) -> bool:
    return all(map(torch.allclose, got, right))
