"""Solutions of the exercises of chapter 13."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def my_staleness(record: Sequence[tuple[str, int]]) -> list[int]:
    """Count, for each push, the pushes since its worker's newest pull."""
    version, pulled, found = 0, {}, []
    for what, worker in record:
        if what == "pull":
            pulled[worker] = version
        else:
            found.append(version - pulled[worker])
            version += 1
    return found


def my_replay(
    record: Sequence[tuple[str, int]],
    weights: Tensor,
    gradient: Callable[[int, Tensor], Tensor],
    lr: float,
) -> Tensor:
    """Update the weights in the record's order, with gradients at pulled weights."""
    weights, pulled = weights.clone(), {}
    for what, worker in record:
        if what == "pull":
            pulled[worker] = weights.clone()
        else:
            weights -= lr * gradient(worker, pulled[worker])
    return weights


def my_may_begin(clocks: Mapping[int, int], worker: int, bound: float) -> bool:
    """Compare a worker's clock with the slowest remaining worker's."""
    return clocks[worker] - min(clocks.values()) <= bound


def my_server(weights: Tensor, lr: float, pushes: int) -> None:
    """Serve workers in the order of arrival."""
    gradient = torch.empty_like(weights)
    for _ in range(pushes):
        worker = dist.recv(gradient)  # from any rank; returns the sender
        weights -= lr * gradient
        dist.send(weights, worker)
