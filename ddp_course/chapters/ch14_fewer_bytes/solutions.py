"""Solutions of the exercises of chapter 14."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def my_memory(compress: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Add the error of earlier steps, and keep the new error."""
    memory: Tensor | None = None

    def send(gradient: Tensor) -> Tensor:
        nonlocal memory
        wanted = gradient if memory is None else gradient + memory
        sent = compress(wanted)
        memory = wanted - sent
        return sent

    return send


def my_topk_mean(gradient: Tensor, k: int) -> Tensor:
    """Gather all ranks' indices and values, and add each value at its index."""
    n, flat = dist.get_world_size(), gradient.flatten()
    mine = flat.abs().topk(k).indices
    indices = [torch.empty_like(mine) for _ in range(n)]
    values = [torch.empty_like(flat[mine]) for _ in range(n)]
    dist.all_gather(indices, mine)
    dist.all_gather(values, flat[mine])
    total = torch.zeros_like(flat)
    for where, what in zip(indices, values, strict=True):
        total[where] += what
    return (total / n).view_as(gradient)


def my_outer_step(
    common: Sequence[Tensor],
    replicas: Sequence[Sequence[Tensor]],
    momentum: Sequence[Tensor],
    lr: float,
    mu: float,
) -> None:
    """Step with Nesterov momentum; the gradient is the difference from the mean."""
    for own, others, velocity in zip(
        common, zip(*replicas, strict=True), momentum, strict=True
    ):
        gradient = own - sum(others) / len(others)
        velocity.mul_(mu).add_(gradient)
        own.sub_(lr * (gradient + mu * velocity))
