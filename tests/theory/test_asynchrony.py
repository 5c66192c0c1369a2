"""Formulas of training without waiting, beside imagined runs of it."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest
import torch
from refusals import refused
from torch import nn

from ddp_course.parameter_server import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    DelayCompensation,
    backup,
    bounded,
    by_staleness,
    corrected_momentum,
    replay,
    simulate_run,
)
from ddp_course.theory import (
    gradients_per_second,
    server_bytes,
    stable_lr,
)

RULES = {
    "synchronous": SYNCHRONOUS,
    "backup": backup(1),
    "asynchronous": ASYNCHRONOUS,
    "bounded": bounded(2),
}


@pytest.mark.parametrize(
    ("way", "slow"), [*itertools.product(RULES, (1.0, 1.7, 4.0, 8.0))]
)
def test_throughput_with_a_straggler(way, slow):
    seconds = [1.0, 1.0, 1.0, slow]
    run = simulate_run(RULES[way], seconds, 1000)
    spare = {"spare": 1} if way == "backup" else {}
    results = gradients_per_second(way, seconds, **spare)
    assert run.gradients / run.seconds == pytest.approx(results, rel=0.02)
    for other in RULES.keys() - {way, "backup"}:  # which formula, matters
        if slow > 1.0 and {way, other} != {"synchronous", "bounded"}:
            wrong = gradients_per_second(other, seconds)
            assert run.gradients / run.seconds != pytest.approx(wrong, rel=0.02)


@pytest.mark.parametrize("seconds", [[1.0], [1.0] * 3, [1, 1, 5], [1, 2, 3, 8.5]])
def test_mean_staleness_is_workers_minus_1_whoever_is_slow(seconds):
    """And of one worker, t_k times what the others make in a second."""
    run = simulate_run(ASYNCHRONOUS, seconds, 3000)
    ages = run.staleness()
    assert fmean(ages) == pytest.approx(len(seconds) - 1, abs=0.03)
    takers = [worker - 1 for step in run.select("step") for worker in step.workers]
    for worker, own in enumerate(seconds):
        mine = [age for age, taker in zip(ages, takers, strict=True) if taker == worker]
        others = gradients_per_second("asynchronous", seconds) - 1 / own
        assert fmean(mine) == pytest.approx(own * others, rel=0.05)


def after(workers: int, lr: float, steps: int = 400, remedy=None) -> float:
    """Return the distance from the bottom of a quadratic of curvature 3, from 1."""
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=lr)
    run = simulate_run(ASYNCHRONOUS, [1.0] * workers, steps)
    backward = lambda worker, clock: (1.5 * weight**2).sum().backward()  # noqa: E731
    replay(run, [weight], optimizer, backward, remedy=remedy)
    return weight.abs().item()


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_the_bound_of_stability_is_where_runs_begin_to_diverge(workers):
    bound = stable_lr(3.0, workers - 1)
    assert after(workers, 0.95 * bound) < 0.4
    assert after(workers, 1.05 * bound) > 2


def test_remedies():
    lr = 1.2 * stable_lr(3.0, 3)
    assert after(4, lr) > 100 * after(4, lr, remedy=by_staleness)
    six = torch.tensor(6.0)
    assert [by_staleness(six, age, six, six) for age in (0, 1, 3)] == [6, 6, 2]
    # On this quadratic the guess is right where gradient**2 is the curvature.
    guess = DelayCompensation(1.0)(*map(torch.tensor, (3.0, 4, 0.5, 0.8)))
    assert guess.item() == pytest.approx(3.0 + 9.0 * (0.5 - 0.8))
    assert corrected_momentum(0.9, 4) == pytest.approx(0.15)
    assert server_bytes(4, 1000) == 8000


def test_a_remedy_gets_the_weights_of_now_and_those_of_the_gradient():
    x, weights, seen = nn.Parameter(torch.tensor([5.0])), [5.0], []

    def gradient(worker: int, clock: int) -> None:
        x.grad = x.detach() * worker

    def remedy(gradient, age, now, then):
        seen.append((age, now.item(), then.item()))
        return gradient

    replay(
        simulate_run(ASYNCHRONOUS, [1.0, 1.5, 2.5], 12),
        [x],
        torch.optim.SGD([x], lr=0.1),
        gradient,
        remedy=remedy,
        after_step=lambda version: weights.append(x.item()),
    )
    steps = [(age, weights[k], weights[k - age]) for k, (age, *_) in enumerate(seen)]
    assert seen == steps and max(seen)[0] > 1


test_what_no_formula_is_for = refused(
    (lambda: gradients_per_second("slow", [1.0]), "way is 'slow'; it can be 'sync"),
    (
        lambda: gradients_per_second("backup", [1], spare=1),
        "spare is 1; for backup with 1",
    ),
    (lambda: gradients_per_second("bounded", [1, 1], 1), "only 'backup' has spare"),
    (lambda: gradients_per_second("asynchronous", [1, 1], 2), "out for 'asynchronous'"),
)
