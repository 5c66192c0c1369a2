"""Simulate local SGD in one process: the same numbers, without launching ranks.

The simulated ranks step one after the other, each with a model and an optimizer of its
own. Means are added up in the order of `collectives.naive_all_reduce`, so the bits are
those of real ranks with that all-reduce; for two ranks, those of any all-reduce.
PyTorch is set to one thread, as on every rank, because several threads would round sums
differently. Chapter 14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddp_course.local_sgd.local import LocalSteps


@dataclass(frozen=True)
class SimulatedTraining:
    """The results of `simulate_training`, with one entry for each step.

    Attributes:
        losses: `losses[k]` is the mean of the ranks' losses before step k + 1.
        drift: `drift[k][r]` is the distance of rank r from the mean after step k + 1,
            before they average.
        models: the ranks' models at the end.
    """

    losses: list[float]
    drift: list[list[float]]
    models: list[nn.Module] = field(repr=False)


def simulate_training(
    build: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], LocalSteps],
    loss: Callable[[nn.Module, int, int], Tensor],
    ranks: int,
    steps: int,
) -> SimulatedTraining:
    """Train in this process as `ranks` ranks would.

    Args:
        build: returns a model, the same each time.
        wrap: returns a LocalSGD or DiLoCo for a model. In its `warmup` the simulation
            averages gradients, as a DDP does; the model must not be a DDP.
        loss: called as `loss(model, step, rank)`; returns that rank's loss.
        ranks: the number of ranks.
        steps: the number of steps.

    Chapter 14.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _simulate(build, wrap, loss, ranks, steps)
    finally:
        torch.set_num_threads(threads)


def _simulate(
    build: Callable, wrap: Callable, loss: Callable, ranks: int, steps: int
) -> SimulatedTraining:
    models = [build() for _ in range(ranks)]
    optimizers = [wrap(model) for model in models]
    losses, drifts = [], []
    for step in range(steps):
        own = [loss(model, step, rank) for rank, model in enumerate(models)]
        for optimizer, one in zip(optimizers, own, strict=True):
            optimizer.zero_grad()
            one.backward()
        losses.append(sum(one.item() for one in own) / ranks)
        if optimizers[0].steps < optimizers[0].warmup:
            _average_gradients(optimizers)
        due = [optimizer.step_alone() for optimizer in optimizers]
        mean = _means([optimizer.averaged_tensors() for optimizer in optimizers])
        trained = len(optimizers[0].trained)
        drifts.append([distance(o.trained, mean[:trained]) for o in optimizers])
        if due[0]:
            for optimizer in optimizers:
                optimizer.apply_mean(mean)
    return SimulatedTraining(losses, drifts, models)


def distance(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the 2-norm of the difference, with all tensors as one long vector."""
    pairs = zip(tensors, others, strict=True)
    squares = [((a.detach().double() - b.double()) ** 2).sum() for a, b in pairs]
    return float(sum(squares)) ** 0.5


@torch.no_grad()
def _means(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean of each column, added in the order of `naive_all_reduce`."""
    results = []
    for first, *others in zip(*rows, strict=True):
        mean = first.detach().clone()
        for other in reversed(others):
            mean += other
        results.append(mean.div_(len(rows)))
    return results


def _average_gradients(optimizers: Sequence[LocalSteps]) -> None:
    """Replace gradients with their means; a missing gradient counts as zeros."""
    for same in zip(*(optimizer.trained for optimizer in optimizers), strict=True):
        if any(p.grad is not None for p in same):
            rows = [[torch.zeros_like(p) if p.grad is None else p.grad] for p in same]
            [mean] = _means(rows)
            for parameter in same:
                parameter.grad = mean.clone()
