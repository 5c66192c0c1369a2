"""Averages over ranks equal those of one process that has all samples."""

import math
import re
from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from on_ranks import error_of
from refusals import refused
from torch import nn

from ddp_course.collectives import communicator
from ddp_course.data_parallel import (
    MeanOverRanks,
    loss_weight,
    scaled_lr,
    seed_for,
)
from ddp_course.data_parallel.averages import PURPOSES
from ddp_course.launch import here, spawn
from ddp_course.measure import TorchCollectives

# Which samples are in which batch of which rank; the numbers of rows are unequal, one
# batch is empty, and rank 1 of 4 has no batch at all.
BATCHES = {
    1: [[3, 2]],
    4: [[4, 4, 1], [], [2, 0], [5, 5, 5]],
}
NAN = float("nan")


def samples(rank: int) -> list[list[int]]:
    """The values of this rank's samples, batch by batch: whole numbers."""
    sizes = BATCHES[here().topology.world_size][rank]
    return [[100 * rank + 10 * k + i**2 for i in range(n)] for k, n in enumerate(sizes)]


def mean(values: list) -> Fraction | float:
    return Fraction(sum(values), len(values)) if values else NAN


# ---- loss and metrics ----------------------------------------------------------------


def averages() -> dict:
    """On every rank: the mean over all samples, in several ways, and what was sent."""
    rank, world_size = here().rank, here().topology.world_size
    communicator()
    meter = MeanOverRanks()
    for batch in samples(rank):
        value = torch.tensor(float(mean(batch)), dtype=torch.float64)
        meter.update(value.requires_grad_(), len(batch))
    with TorchCollectives() as torch_log:
        found = meter.compute()
    again = meter.compute()
    meter.reset()
    meter.update(rank, 1)
    batches = [samples(r) for r in range(world_size)]
    flat = [
        x for batches_of_rank in batches for batch in batches_of_rank for x in batch
    ]
    return {
        "weighted": gradient_of_weighted_loss(),
        "nobody": nobody_has_samples(),
        "seeded": weights_and_masks(),
        "ours": found,
        "again": again,
        "after reset": meter.compute().mean,
        "closed form": mean(flat),
        "mean of means": mean_of_means(batches),
        "calls": [(call.op, call.nbytes) for call in torch_log.calls],
        "fake": fake(samples(rank)),
    }


def mean_of_means(batches: list[list[list[int]]]) -> float:
    """Over the ranks, of the means over each rank's batches that are not empty."""
    of_ranks = [[mean(b) for b in of_rank if b] for of_rank in batches]
    return float(mean([mean(of_rank) for of_rank in of_ranks if of_rank]))


def fake(batches: list[list[int]]) -> float:
    """What is often written: the mean of the rank's means, averaged over the ranks."""
    means = [float(mean(batch)) for batch in batches if batch]
    total = torch.tensor(sum(means) / max(1, len(means)))
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@pytest.mark.parametrize("world_size", BATCHES)
def test_what_is_computed_over_all_ranks(world_size):
    results = spawn(averages, world_size=world_size, output="none")
    count = sum(sum(sizes) for sizes in BATCHES[world_size])
    for rank in results:
        ours = rank["ours"]
        assert ours.mean == pytest.approx(float(rank["closed form"]), rel=1e-14)
        assert ours.count == count
        assert ours.mean_of_means == pytest.approx(rank["mean of means"], rel=1e-14)
        assert rank["again"] == ours == results[0]["ours"]
        assert rank["after reset"] == (world_size - 1) / 2
        assert rank["calls"] == [("all_reduce", 32)]
        # Planted: the mean of means is another number on these uneven batches.
        assert abs(rank["fake"] - ours.mean) > 0.1
        assert abs(ours.mean_of_means - ours.mean) > 0.1
    for rank in results:
        weighted, plain, full = rank["weighted"]
        torch.testing.assert_close(weighted, full)
        if world_size > 1:  # planted: the mean of means
            assert (plain - full).abs().max() > 0.01
    for number, rank in enumerate(results):
        first, second, third = rank["nobody"]
        assert first.startswith("ValueError: no rank has a sample, so there is no ")
        assert second.startswith("ValueError: n is 0 on this rank, and the sum over al")
        mine = -3 if number == world_size - 1 else 2
        assert third.startswith(f"ValueError: n is {mine} on this rank, and the su")
    weights, masks = zip(*(rank["seeded"] for rank in results), strict=True)
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert len({tuple(mask.tolist()) for mask in masks}) == world_size


def test_equal_batches_hide_the_mistake():
    meter = MeanOverRanks()
    for k in range(4):
        meter.update(k, 3)
    assert meter.compute().mean == meter.compute().mean_of_means == 1.5
    meter.update(10.0, 1)
    assert meter.compute().mean == pytest.approx(28 / 13)
    assert meter.compute().mean_of_means == pytest.approx(16 / 5)


def test_what_update_refuses_and_what_it_does_not_look_at():
    meter = MeanOverRanks()
    meter.update(NAN, 0)  # the mean of nothing
    with pytest.raises(ValueError, match="no rank has a sample"):
        meter.compute()
    for n in (-1, 2.0, None, torch.tensor(3)):
        with pytest.raises(ValueError, match=re.escape(f"n is {n!r}; it must be the")):
            meter.update(1.0, n)
    with pytest.raises(ValueError, match=r"value has shape \[2\]; it must be one num"):
        meter.update(torch.ones(2), 2)
    meter.update(torch.ones(1, 1), 2)
    assert meter.compute().mean == 1
    meter.update(NAN, 1)
    assert math.isnan(meter.compute().mean)


def nobody_has_samples() -> list[str]:
    n = -3 if here().rank == here().topology.world_size - 1 else 2
    calls = MeanOverRanks().compute, partial(loss_weight, 0), partial(loss_weight, n)
    return [error_of(call) for call in calls]


# ---- gradients of unequal batches ----------------------------------------------------


def gradient_of_weighted_loss() -> tuple:
    """The gradient of DDP's mean, with the weight and without, and the full batch's."""
    rank, world_size = here().rank, here().topology.world_size
    torch.manual_seed(0)
    rows = [n + 1 for n in (6, 0, 2, 3)[:world_size]]
    data = torch.randn(sum(rows), 5).split(rows)
    gradients = []
    for weight in (loss_weight(len(data[rank])), 1.0):
        weights = torch.ones(5, requires_grad=True)
        (weight * (data[rank] @ weights).pow(2).mean()).backward()
        dist.all_reduce(weights.grad)
        gradients.append(weights.grad / world_size)
    weights = torch.ones(5, requires_grad=True)
    (torch.cat(data) @ weights).pow(2).mean().backward()
    return *gradients, weights.grad


def test_without_a_process_group():
    assert loss_weight(3) == 1.0


# ---- learning rate -------------------------------------------------------------------


def test_scaled_lr():
    assert scaled_lr(0.1, 8) == pytest.approx(0.8)
    assert scaled_lr(0.1, 1) == 0.1
    assert scaled_lr(3e-4, 4, rule="sqrt") == pytest.approx(6e-4)
    warm = [scaled_lr(0.1, 3, step=k, warmup_steps=4) for k in range(6)]
    assert warm == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.3])
    assert scaled_lr(0.1, 3, step=0) == pytest.approx(0.3)


@given(st.integers(1, 1000), st.integers(0, 100), st.sampled_from(["linear", "sqrt"]))
def test_warm_up_grows_by_equal_amounts(world_size, warmup, rule):
    rates = [
        scaled_lr(1.0, world_size, rule=rule, step=k, warmup_steps=warmup)
        for k in range(warmup + 2)
    ]
    grown = [b - a for a, b in zip(rates[:-1], rates[1:], strict=True)]
    assert grown[:-1] == pytest.approx([grown[0]] * warmup, abs=1e-9)
    assert rates[-1] == rates[-2] == scaled_lr(1.0, world_size, rule=rule)
    assert warmup == 0 or rates[0] == 1.0


def rate(**change):
    return partial(scaled_lr, **{"base_lr": 0.1, "world_size": 2} | change)


test_bad_learning_rates = refused(
    (rate(base_lr=-1), "base_lr is -1; it must be a number of 0 or more"),
    (rate(base_lr=NAN), "base_lr is nan; it must be a number of 0 or more"),
    (rate(world_size=0), "world_size is 0; it must be an integer, 1 or more"),
    (rate(rule="cubic"), "rule is 'cubic'; it can be linear or sqrt"),
    (rate(step=-1), "step is -1; it must be an integer, 0 or more"),
    (rate(warmup_steps=0.5), "warmup_steps is 0.5; it must be an integer, 0 or"),
)


# ---- seeds ---------------------------------------------------------------------------


@pytest.mark.parametrize("purpose", PURPOSES)
def test_seeds(purpose):
    by_rank = [seed_for(rank, 7, purpose) for rank in range(1000)]
    assert by_rank == [seed_for(rank, 7, purpose) for rank in range(1000)]
    assert len(set(by_rank)) == (1 if PURPOSES[purpose] == "same" else 1000)
    assert all(0 <= seed < 2**32 for seed in by_rank)
    # Another experiment is not this one with its ranks renamed, as with seed + rank.
    other = {seed_for(rank, 8, purpose) for rank in range(1000)}
    assert not other & set(by_rank)
    assert {7 + rank for rank in range(4)} & {8 + rank for rank in range(4)}


def test_purposes_do_not_share_seeds():
    assert len({seed_for(0, 0, purpose) for purpose in PURPOSES}) == len(PURPOSES)
    assert seed_for(0, 0, "weights") == 495_657_131  # of all machines, for all time


def weights_and_masks() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed_for(here().rank, 0, "weights"))
    weights = nn.Linear(4, 4).weight.detach()
    torch.manual_seed(seed_for(here().rank, 0, "dropout"))
    return weights, nn.functional.dropout(torch.ones(64))


test_bad_seeds = refused(
    (partial(seed_for, 0, 0, "coffee"), "purpose is 'coffee'; it can be weights, shuf"),
    (partial(seed_for, -1, 0, "weights"), "rank is -1; it must be an integer, 0 or mo"),
    (partial(seed_for, 0, 0.5, "weights"), "seed is 0.5; it must be an integer"),
)
