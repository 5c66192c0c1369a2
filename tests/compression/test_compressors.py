"""Every compressor: the formula's bytes, the numbers of one process; and plants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from refusals import refused
from torch import Tensor

from ddp_course.collectives import naive
from ddp_course.compression import (
    Compressor,
    CourseExchange,
    ErrorFeedback,
    Exchange,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    SixteenBits,
    TopK,
    compressor,
    mean_in_16_bits,
    mean_in_low_rank,
    play,
)
from ddp_course.compression import powersgd as powersgd_module
from ddp_course.compression.hook import as_bytes, compress
from ddp_course.launch import deadlock, spawn
from ddp_course.measure import ByteMeter, SystemBytes
from ddp_course.mechanisms.comm_hook import GradBucket
from ddp_course.theory import compressed_bytes

SHAPES = [(37, 29), (), (5, 4, 3), (11,), (64, 33), (37, 29)]  # nothing divides by 3
STEPS, RANKS = 3, 3
ALL = ("fp16", "bf16", "int8", "int8:32", "sign", "topk:0.02", "randomk:0.02")
ALL += ("powersgd:1", "powersgd:3")


def compressor_of(words: str, exchange: Exchange | None = None) -> Compressor:
    """Return a compressor by its name in `theory`, which knows blocks, too."""
    if words == "int8:32":
        return Int8(32, exchange or CourseExchange())
    return compressor(words, exchange)


def gradients(rank: int, step: int) -> list[Tensor]:
    seeded = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=seeded) for shape in SHAPES]


def flat(own: list[Tensor]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in own])


def bucket_of(own: list[Tensor]) -> GradBucket:
    buffer = flat(own)
    parts = buffer.split([g.numel() for g in own])
    views = [part.view(g.shape) for part, g in zip(parts, own, strict=True)]
    return GradBucket(0, buffer, own, views, last=True)


def as_ranks(make: Callable[[], Compressor]) -> tuple[list[Tensor], list[int]]:
    """Average on this rank; return the means, and bytes by meter and by the system."""
    one, found = make(), []
    for step in range(STEPS):
        bucket = bucket_of(gradients(dist.get_rank(), step))
        with ByteMeter() as meter, SystemBytes() as system:
            mean = one.mean(bucket)
        found.append(mean.clone())
    # gloo's own: 48 bytes for each message, and 48 that say a receiver is ready.
    headers = 48 * 2 * sum(meter.messages.values())
    return found, [meter.total_sent, system.written - headers]


def as_one(make: Callable[[], Compressor], ranks: int = RANKS) -> list[Tensor]:
    """Average in one process that plays all ranks, which must get the same bits."""
    those, found = [make() for _ in range(ranks)], []
    for step in range(STEPS):
        means = play(those, [gradients(rank, step) for rank in range(ranks)])
        first, *others = map(flat, means)
        assert all(torch.equal(first, other) for other in others)
        found.append(first)
    return found


def job() -> dict[str, tuple]:
    # Else a rank that has waited for 2 s writes into the store: the system counts that.
    deadlock.PATIENCE = float("inf")
    results = {}
    for words in ALL:
        in_order = CourseExchange(
            all_reduce=naive.through_rank_0
        )  # adds as `play` does
        means, _ = as_ranks(partial(compressor_of, words, in_order))
        results[words] = means, as_ranks(partial(compressor_of, words))[1]
    return results


def test_bytes_are_the_formula_and_numbers_those_of_one_process():
    results = spawn(job, world_size=RANKS, output="none")
    for words in ALL:
        right = as_one(partial(compressor_of, words))
        for rank, (means, (metered, written)) in enumerate(t[words] for t in results):
            assert all(map(torch.equal, means, right)), words
            formula = compressed_bytes(words, SHAPES, RANKS, rank)
            assert metered == formula, (words, rank)
            assert 0 <= written - formula < 400, (words, rank, written, formula)


def in_a_few_lines() -> dict[str, tuple[Tensor, Tensor]]:
    """Return the means of the naive functions, each beside its compressor's."""
    pairs, rank = {}, dist.get_rank()
    own = gradients(rank, 0)[0]
    sixteen = SixteenBits().mean(bucket_of([own])).view(own.shape)
    pairs["16 bits"] = mean_in_16_bits(own), sixteen
    powersgd = PowerSGD(2, feedback=False)
    q = PowerSGD(2).random_q(own[None])[0]
    for step in range(STEPS):
        own = gradients(rank, step)[0]
        mean, q = mean_in_low_rank(own, q)
        right = powersgd.mean(bucket_of([own])).view(own.shape)
        pairs[f"low rank, step {step}"] = mean, right
    own_q = torch.randn(29, 2, generator=torch.Generator().manual_seed(rank))
    pairs["planted: unequal Q"] = mean_in_low_rank(own, own_q)[0], right
    return pairs


def test_the_naive_functions_are_the_compressors_without_memory():
    for pairs in spawn(in_a_few_lines, world_size=RANKS, output="none"):
        assert torch.equal(*pairs["16 bits"])
        planted = pairs.pop("planted: unequal Q")
        assert all(torch.allclose(*pair, atol=1e-5) for pair in pairs.values())
        assert not torch.allclose(*planted, atol=1e-2)


# ---- what is lost --------------------------------------------------------------------


class Forgets(ErrorFeedback):
    """Plant: the errors are stored, and never added."""

    def add(self, bucket, gradient):
        return gradient.clone()


def what_is_lost(words: str, planted: bool = False) -> tuple[Tensor, Tensor]:
    """Return what six steps have lost on two ranks, and what their memories hold."""
    those, lost = [compressor_of(words) for _ in range(2)], 0
    for one in those if planted else ():
        one.feedback = Forgets()
    for step in range(6):
        own = [gradients(rank, step) for rank in range(2)]
        lost = lost + sum(map(flat, own)) / 2 - flat(play(those, own)[0])
    return lost, sum(one.feedback.memory[0] for one in those) / 2


@pytest.mark.parametrize("words", ["sign", "topk:0.1", "randomk:0.1", "powersgd:2"])
def test_with_feedback_what_is_lost_is_what_the_memories_hold(words):
    """The sum of all that was sent is that of all gradients, less the last errors."""
    assert torch.allclose(*what_is_lost(words), atol=1e-4)
    lost, errors = what_is_lost(words, planted=True)
    assert (lost - errors).norm() > 0.5 * lost.norm()


def test_powersgds_memory_of_ranks_that_differ_needs_32_bits():
    """With 16 bits, the mean of the ranks' 5/4 and -3/4 is lost after 300 steps."""
    means = {}
    for dtype in (torch.float32, torch.bfloat16):
        ranks = [PowerSGD(1) for _ in range(2)]
        own = [[torch.full((4,), value, dtype=dtype)] for value in (1.25, -0.75)]
        for _ in range(300):
            (mean,), _ = play(ranks, own)
        means[dtype] = mean[0].item()
    assert means[torch.float32] == 0.25
    assert means[torch.bfloat16] != 0.25


# ---- plants --------------------------------------------------------------------------


class OwnScale(Sign):
    """Plant: the scale of one rank is used for all."""

    def decode(self, sent, like):
        self.first = getattr(self, "first", None)
        self.first = sent[-4:] if self.first is None else self.first
        return super().decode(torch.cat([sent[:-4], self.first]), like)


class OwnOrder(TopK):
    """Plant: indices are sorted, and the values stay in their old order."""

    def encode(self, v, index):
        k = round(self.density * v.numel())
        where = v.abs().topk(k).indices
        return as_bytes(where.sort().values.to(torch.int32), v[where])


class NoMean(SixteenBits):
    """Plant: the sum is taken for the mean."""

    def mean(self, bucket):
        return super().mean(bucket) * self.exchange.size


PLANTS = {
    "sign": OwnScale,
    "topk:0.02": partial(OwnOrder, 0.02),
    "fp16": NoMean,
}


@pytest.mark.parametrize("words", PLANTS)
def test_a_wrong_compressor_is_seen(words):
    """By what it gives after three steps; ranks that differ are seen by `as_one`."""
    right = as_one(partial(compressor_of, words))
    try:
        wrong = as_one(PLANTS[words])
    except AssertionError:
        return
    assert not all(map(torch.equal, wrong, right))


def test_powersgd_that_orthogonalises_on_one_rank_is_seen(monkeypatch):
    right = as_one(partial(PowerSGD, 2))
    plain, calls = powersgd_module.orthonormal, []

    def now_and_then(matrices):
        calls.append(1)
        return plain(matrices) if len(calls) % 2 else matrices

    monkeypatch.setattr(powersgd_module, "orthonormal", now_and_then)
    with pytest.raises(AssertionError):
        wrong = as_one(partial(PowerSGD, 2))
        assert all(map(torch.equal, wrong, right))


def test_a_matrix_that_is_zero_in_powersgds_first_step_is_sent_in_the_next(monkeypatch):
    def second() -> float:
        one, matrix = [PowerSGD(1)], torch.arange(1.0, 13).outer(torch.ones(15))
        return [play(one, [[scale * matrix]])[0][0] for scale in (0, 1)][1].norm()

    assert second() > 40
    divided = lambda m: m.div_(m.norm(dim=-2, keepdim=True) + 1e-30)  # noqa: E731
    monkeypatch.setattr(powersgd_module, "orthonormal", divided)
    assert second() == 0  # planted: Gram and Schmidt make nothing of nothing


test_what_cannot_be_is_told = refused(
    (
        lambda: compress(PowerSGD, None),
        r"state is the class PowerSGD; pass an object of this class, PowerSGD\(",
    ),
    (
        lambda: compress(None, None),
        r"state is None; it must be .*TopK\(0.01\), compress",
    ),
    (lambda: compress("sign", None), "state is a str; it must be a compressor: "),
    (lambda: TopK(0), "density is 0; it must be above 0, and at most 1"),
    (lambda: RandomK(True), "density is True; it must be a number"),
    (lambda: PowerSGD(0), "rank is 0; it must be a whole number, 1 or more"),
    (lambda: Int8(block=2.5), "block is 2.5; it must be a whole number above 0"),
    (lambda: SixteenBits(torch.float32), "must be float16 or bfloat16"),
)
