"""One process plays all ranks: the same numbers, without launching anything.

The ranks step one after the other, each with a model and an optimizer of its own, and
their mean is added up in the order of `collectives.naive_all_reduce`: so the bits are
those of real ranks with that one; on two ranks, with any. For that it takes one thread
meanwhile, as every rank has: sums in parts are rounded otherwise. Chapter 14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ddp_course.local_sgd.local import LocalSteps, distance


@dataclass(frozen=True)
class Simulated:
    """What came out: a row for each step.

    `losses[k]` is the mean of the ranks' losses before step k + 1, `drift[k][r]` the
    distance of rank r from the mean after it, before they meet; `models` are the ranks'
    at the end.
    """

    losses: list[float]
    drift: list[list[float]]
    models: list[nn.Module] = field(repr=False)


def simulate(
    build: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], LocalSteps],
    loss: Callable[[nn.Module, int, int], Tensor],
    ranks: int,
    steps: int,
) -> Simulated:
    """Train as so many ranks would; pure, if what it is given is.

    Args:
        build: returns a model, the same each time.
        wrap: returns its LocalSGD, or DiLoCo. In its `warmup` gradients are averaged,
            as by a DDP, which does not need to be there.
        loss: called as `loss(model, step, rank)`; that rank's loss in this step.

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
) -> Simulated:
    models = [build() for _ in range(ranks)]
    parts = [wrap(model) for model in models]
    losses, apart = [], []
    for step in range(steps):
        each = [loss(model, step, rank) for rank, model in enumerate(models)]
        for part, one in zip(parts, each, strict=True):
            part.zero_grad()
            one.backward()
        losses.append(sum(one.item() for one in each) / ranks)
        if parts[0].steps < parts[0].warmup:
            _average_gradients(parts)
        due = [part.step_alone() for part in parts]
        mean = _means([part.place() for part in parts])
        trained = len(parts[0].trained)
        apart.append([distance(p.trained, mean[:trained]) for p in parts])
        if due[0]:
            for part in parts:
                part.meet(mean)
    return Simulated(losses, apart, models)


@torch.no_grad()
def _means(rows: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean of each column, added up as through rank 0: it, the last, ..."""
    found = []
    for first, *others in zip(*rows, strict=True):
        mean = first.detach().clone()
        for other in reversed(others):
            mean += other
        found.append(mean.div_(len(rows)))
    return found


def _average_gradients(parts: Sequence[LocalSteps]) -> None:
    """Replace gradients by their means; where a rank has none, zero counts."""
    for same in zip(*(part.trained for part in parts), strict=True):
        if any(p.grad is not None for p in same):
            rows = [[torch.zeros_like(p) if p.grad is None else p.grad] for p in same]
            [mean] = _means(rows)
            for parameter in same:
                parameter.grad = mean.clone()
