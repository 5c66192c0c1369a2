"""The exercises of chapter 14: an error memory, the largest numbers, an outer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch14_fewer_bytes import solutions
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import exercise, shown
from ddp_course.lab.judge import Case, Draw, same_as, same_on_ranks
from ddp_course.lab.values import equal_values

# ---- my_memory -----------------------------------------------------------------------


def largest(tensor: Tensor) -> Tensor:
    """Keep the number that is furthest from 0; the others become 0."""
    kept = torch.zeros_like(tensor)
    where = tensor.abs().argmax()
    kept.view(-1)[where] = tensor.reshape(-1)[where]
    return kept


def largest_of_rows(tensor: Tensor) -> Tensor:
    """Keep the number of each row that is furthest from 0; a vector is one row."""
    where = tensor.abs().argmax(-1, keepdim=True)
    return torch.zeros_like(tensor).scatter(-1, where, tensor.gather(-1, where))


class EachInTurn:
    """A compressor that keeps one number, a different one in each call."""

    calls = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """Keep number k in call k; the others become 0."""
        kept, where = torch.zeros_like(tensor), self.calls % tensor.numel()
        kept.view(-1)[where] = tensor.reshape(-1)[where]
        self.calls += 1
        return kept

    def __eq__(self, other: object) -> bool:
        """Compare the numbers of calls."""
        return isinstance(other, EachInTurn) and self.calls == other.calls

    __hash__ = object.__hash__


LONG = 29  # this case has many steps
QUIET = 9  # in this case each gradient alone is rounded to 0
EACH_IN_TURN = "one number, another in each call"
COMPRESSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "the largest number alone": largest,
    "the largest number of each row": largest_of_rows,
    "rounded to whole numbers": torch.round,
    "a half of it": lambda tensor: tensor / 2,
    "nothing left": torch.zeros_like,
    "nothing lost": lambda tensor: tensor,  # returns the tensor itself
    EACH_IN_TURN: EachInTurn(),
}


@exercise("my_memory", solution=solutions.my_memory)
def check_my_memory(answer: Answer) -> str:
    """`my_memory(compress)`: a function that sends a gradient, with error feedback.

    What did `compress` hold back in the last step, and when can it be sent after all?

    Keep a tensor between the calls. Add it to the gradient before you compress, and
    afterwards keep the part of that sum which was not sent. Each rank has its own
    memory.
    """
    same_as(
        *(
            Answer("my_memory", _sender(answer.function)),
            _sender(solutions.my_memory),
            _stream,
        ),
        cases=42,
        where=lambda case: _name_of(case.args["compress"]) + ":",
        hints={
            "right": wrong_memory,
            "fits": wrong_memory,
            "in_place": "`compress` must be called once for each gradient.",
        },
    )
    return (
        f"{len(COMPRESSORS)} compressors, two dtypes, and two ranks with separate "
        "memories"
    )


def _name_of(compress: Callable) -> str:
    if isinstance(compress, EachInTurn):
        return EACH_IN_TURN
    return next(name for name, one in COMPRESSORS.items() if one is compress)


def _stream(d: Draw) -> tuple[Callable, list[list[Tensor]]]:
    """Return a compressor, and each rank's gradients of some steps, for 1 or 2 ranks.

    In the last third of the cases the gradients are tiny, and there are more steps.
    """
    compress = list(COMPRESSORS.values())[d.case % len(COMPRESSORS)]
    dtype = (torch.float32, torch.float64)[d.case // len(COMPRESSORS) % 2]
    shape, steps = d.same.choice([(2, 3), (7,), (1,)]), d.same.randint(3, 6)
    third = d.case // (2 * len(COMPRESSORS))
    ranks, unit = 1 + third % 2, 2.0**-6
    if third == 2:
        steps, unit = 110 if d.case == LONG else 20, 2.0**-40
    tensors = [
        [d.tensor(shape, dtype) * unit for _ in range(steps)] for _ in range(ranks)
    ]
    if third == 2:  # one gradient is zero, but something was held back before
        tensors[0][2].zero_()
    if d.case == QUIET:
        for gradient in tensors[0]:
            gradient.clamp_(-0.375, 0.375)
    return compress, tensors


def _sender(my_memory: Callable) -> Callable:
    """Return a function that sends all ranks' gradients, step by step."""

    def send_all(compress: Callable, streams: list[list[Tensor]]) -> list[Any]:
        """Return (sent tensor, gradient after the call) for each step and rank.

        A rank copies gradients into two tensors in turns, and overwrites the tensor
        that was sent, as an in-place all-reduce does.
        """
        sends = [my_memory(compress) for _ in streams]
        if not all(map(callable, sends)):
            return []
        pairs = [(torch.empty_like(s[0]), torch.empty_like(s[0])) for s in streams]
        sent = []
        for step, gradients in enumerate(zip(*streams, strict=True)):
            buckets = [pair[step % 2] for pair in pairs]
            for send, bucket, gradient in zip(sends, buckets, gradients, strict=True):
                got = send(bucket.copy_(gradient))
                is_tensor = isinstance(got, Tensor)
                sent.append((got.clone() if is_tensor else got, bucket.clone()))
                if is_tensor:
                    got.detach().zero_()
        return sent

    return send_all


def wrong_memory(case: Case) -> str:
    """Describe the first wrong step, and its mistake if that is a known one."""
    if not case.got:
        return "my_memory must return a function."
    compress, streams = case.args.values()
    ranks = len(streams)
    errors = [torch.zeros_like(stream[0]) for stream in streams]
    rest = [torch.zeros_like(stream[0]) for stream in streams]
    last = [torch.zeros_like(stream[0]) for stream in streams]
    pairs = zip(case.got, case.wanted, strict=True)
    for number, ((got, bucket), (right, gradient)) in enumerate(pairs):
        step, rank = divmod(number, ranks)
        mistakes = {
            "has forgotten what was held back": compress(gradient),
            "subtracts what it should add": compress(gradient - errors[rank]),
            "has kept only the rest of the last gradient": compress(
                gradient + rest[rank]
            ),
            "adds the memory after compressing": compress(gradient) + errors[rank],
            "still reads the tensor that was sent, which the caller may change": (
                compress(gradient + errors[rank] + last[rank])
            ),
            "reads what was sent, which the caller has overwritten": (
                compress(gradient + errors[rank] - last[rank])
            ),
        }
        if not equal_values(bucket, gradient):
            return "the gradient was changed; work on a copy."
        if not equal_values(got, right):
            break
        rest[rank], last[rank] = gradient - right, right
        errors[rank] = errors[rank] + rest[rank]
    why = "the sum of the gradient and all that was held back before, compressed."
    if step == 0:
        why = "the compressed gradient: nothing was held back before."
    if ranks == 2:
        why += " Does each memory have a tensor of its own?"
    elif like := _mistake(got, mistakes):
        why += f" Yours {like}."
    return (
        f"in step {step} rank {rank} sent {shown(got)}; expected {shown(right)}, which "
        f"is {why}"
    )


def _mistake(got: Any, mistakes: Mapping[str, Tensor]) -> str:
    """Return the text in `mistakes`, {text: result}, whose result is `got`, or ""."""
    return next(
        (words for words, of_it in mistakes.items() if equal_values(got, of_it)), ""
    )


# ---- my_topk_mean --------------------------------------------------------------------

TOPK = {
    "fits": "returned {got}; expected {form}: the mean has the gradient's shape.",
    "bytes": "wrote {written:,} bytes by the operating system's count; {needed:,} are "
    "enough. Only indices and values should travel.",
}
GRADIENTS = (  # (shape, k)
    *(((2, 3), 2), ((7,), 3), ((5,), 5), ((142, 141), 10), ((9,), 3)),
    *(((4, 2, 2), 5), ((), 1), ((40_000,), 100), ((2, 3), 2), ((3000,), 20)),
)
STRIDED, TINY, COARSE = 3, 4, 9  # cases: not contiguous, squares are zero, bfloat16
SPARSE = 8  # a case in which the last number alone is not zero, and k is 2


@exercise("my_topk_mean", solution=solutions.my_topk_mean)
def check_my_topk_mean(answer: Answer) -> str:
    """`my_topk_mean(gradient, k)`: the mean of every rank's k largest numbers.

    Each rank has chosen different places. What must ranks send beside the numbers?

    All-gather the k places of each rank, and its k values in the same order. Start from
    zeros, add each rank's values at its places, and divide by the number of ranks. A
    gradient may have any shape: the result has that shape, too.
    """
    same_on_ranks(
        *(answer, solutions.my_topk_mean, _gradient),
        worlds=(2, 3, 1),
        cases=len(GRADIENTS),
        watch=["bytes"],
        hints=TOPK | {"right": wrong_mean},
        hint="Every rank calls the same collectives, with tensors of the same size.",
    )
    return (
        f"{3 * len(GRADIENTS)} gradients on one to three real ranks; only indices and "
        "values travel, by the operating system's count"
    )


def _gradient(d: Draw) -> tuple[Tensor, int]:
    """Return k, and a gradient in which no two numbers but zeros have the same size."""
    shape, k = GRADIENTS[d.case]
    numel, dtype = math.prod(shape), (torch.float32, torch.float64)[d.case % 2]
    dice = torch.Generator().manual_seed(d.own.getrandbits(32))
    steps = torch.randint(1, 60, (numel,), generator=dice)
    sizes = steps.cumsum(0)[torch.randperm(numel, generator=dice)]
    signs = 2 * torch.randint(2, (numel,), generator=dice) - 1
    if d.case == COARSE:  # consecutive bfloat16 numbers from 1 on, all distinct
        bits = sizes.argsort() + 0x3F80
        gradient = bits.to(torch.int16).view(torch.bfloat16) * signs
    else:
        gradient = (sizes * signs).view(shape).to(dtype) / 8
    if gradient.dtype == torch.float64:
        gradient *= 1 + 2**-30  # float32 would lose this
    if d.case == STRIDED:
        gradient = gradient.T.contiguous().T
    if d.case == TINY:
        gradient *= 2.0**-80
    if d.case == SPARSE:
        gradient.view(-1)[:-1] = 0
    return gradient * (d.rank != d.zeros_on), k


def wrong_mean(case: Case) -> str:
    """Return the hint for a wrong mean, with the mistake if `_outcomes` knows it."""
    n, k = dist.get_world_size(), case.args["k"]
    every = [_gradient(Draw(case.number, r, n))[0].flatten() for r in range(n)]
    outcomes = _outcomes(every, k, dist.get_rank())
    views = {words: one.view_as(case.wanted) for words, one in outcomes.items()}
    why = _mistake(case.got, views)
    why = why or "Are these each rank's largest, at that rank's own places?"
    return f"returned {shown(case.got)}; expected {shown(case.wanted)}. {why}"


def _outcomes(every: Sequence[Tensor], k: int, rank: int) -> dict[str, Tensor]:
    """Return {description of a mistake: its result}; `every`: all ranks' gradients."""
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
        "That is the sum; is it the mean?": n * right,
        "Divide by all ranks, even where only some send.": n * right / senders,
        "Are these the largest by size, whatever their sign?": put(signed, at(signed)),
        "The signs are lost.": put(places, [x.abs() for x in values]),
        "If two ranks send the same place, both add up.": put(places, values, False),
        "All values stand at this rank's places.": put([places[rank]], [sum(values)]),
        "These are the largest of the mean.": put([large], [n * mean[large]]),
    }


# ---- my_outer_step -------------------------------------------------------------------


@exercise("my_outer_step", solution=solutions.my_outer_step)
def check_my_outer_step(answer: Answer) -> str:
    """`my_outer_step(common, replicas, momentum, lr, mu)`: DiLoCo's outer step.

    With which sign is the replicas' mean change a gradient?

    The gradient is the common point minus the mean of the replicas. The momentum
    becomes mu times itself, plus the gradient. Then subtract lr times (the gradient
    plus mu times the new momentum) from the common point. Change tensors in place.
    """
    hints = {
        "kept": "changed the replicas; leave them as they are.",
        "in_place": wrong_outer_step,
    }
    same_as(answer, solutions.my_outer_step, _outer, hints=hints)
    return "60 steps, of one to four replicas, with and without a momentum"


def _outer(
    d: Draw,
) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor], float, float]:
    shapes = d.same.choices([(2, 2), (3,), (), (0,)], k=d.same.randint(1, 4))
    dtype = (torch.float32, torch.float64)[d.case % 2]
    ranks, strided = d.same.randint(2 if d.case < 5 else 1, 4), d.case % 4 > 1
    common, momentum, *replicas = (
        [d.tensor(shape, dtype, strided=strided) / 64 for shape in shapes]
        for _ in range(ranks + 2)
    )
    if d.case % 10 == 8:  # as if no replica had moved
        replicas = [[tensor.clone() for tensor in common] for _ in replicas]
    if d.case % 5 == 4:  # as before the first outer step
        for velocity in momentum:
            velocity.zero_()
    return (
        common,
        replicas,
        momentum,
        d.same.choice([1.0, 0.5, 0.7]) * (d.case != 12),  # lr may be 0
        d.same.choice([0.0, 0.75, 0.9]),
    )


def wrong_outer_step(case: Case) -> str:
    """Describe the mistake: in the momentum or, if that is right, in the step."""
    got, right = case.after["momentum"], case.right["momentum"]
    if not equal_values(got, right):
        return (
            f"left {shown(got)} in `momentum`; expected {shown(right)}: mu times the "
            "old one, plus the way *back* from the mean to the common point, in the "
            "tensors themselves."
        )
    got, right = case.after["common"], case.right["common"]
    return (
        f"left {shown(got)} in `common`; expected {shown(right)}, in the tensors "
        "themselves: the old point minus lr times (the gradient plus mu times the "
        "*new* momentum)."
    )
