"""Solutions of the exercises of chapter 08."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def my_schedule(units: int, prefetch: int, keep: bool) -> list[tuple[str, int]]:
    """Return a rank's operations in a step: gather ahead, compute, free, reduce."""
    ops: list[tuple[str, int]] = []
    whole: set[int] = set()

    def compute(what: str, order: list[int], free: bool) -> None:
        for k, unit in enumerate(order):
            for ahead in order[k : k + 1 + prefetch]:
                if ahead not in whole:
                    ops.append(("gather", ahead))
                    whole.add(ahead)
            ops.append((what, unit))
            if free:
                ops.append(("free", unit))
                whole.remove(unit)
            if what == "backward":
                ops.append(("reduce", unit))

    compute("forward", list(range(units)), free=not keep)
    compute("backward", list(range(units))[::-1], free=True)
    return ops


def sharded_linear(
    x: Tensor,
    shard: Tensor,
    gather: Callable[[Tensor], Tensor],
    reduce_scatter: Callable[[Tensor], Tensor],
    world_size: int,
) -> Tensor:
    """Return `x @ weight.T`; keep no whole weight between forward and backward."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, shard: Tensor) -> Tensor:
            ctx.save_for_backward(x, shard)  # not the whole weight
            return x @ gather(shard).T

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            x, shard = ctx.saved_tensors
            grad_x = grad @ gather(shard)  # whole once more, for a moment
            return grad_x, reduce_scatter(grad.T @ x) / world_size

    return Linear.apply(x, shard)


def ranks_needed(
    units: list[int], memory: int, activations: int, most: int = 1024
) -> int | None:
    """Return the least number of ranks with which stage 3 fits, or None."""
    pairs = [units] if len(units) == 1 else list(zip(units, units[1:], strict=False))
    for ranks in range(1, most + 1):
        shards = sum(16 * -(-unit // ranks) for unit in units)
        whole = 4 * max(map(sum, pairs))
        gradients = 4 * max(units)
        if shards + whole + gradients + activations <= memory:
            return ranks
    return None
