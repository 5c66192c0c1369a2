"""Solutions to the exercises of chapter 07."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import all_gather_single, reduce_scatter_single


def my_pieces(
    numels: list[int], rank: int, world_size: int
) -> list[tuple[int, int, int]]:
    """Cut the row into equal shards; return the parts of parameters in one shard."""
    length = -(-sum(numels) // world_size)  # rounded up
    begin, end = rank * length, (rank + 1) * length
    pieces, start = [], 0  # start: offset of parameter k in the row
    for k, numel in enumerate(numels):
        first, last = max(begin, start), min(end, start + numel)
        if first < last:
            pieces.append((k, first - start, last - start))
        start += numel
    return pieces


def sharded_step(
    weights: Tensor, gradient: Tensor, momentum: Tensor, lr: float, beta: float
) -> None:
    """Reduce-scatter the gradients, step this rank's shard, all-gather the weights."""
    mean = torch.empty_like(momentum)
    reduce_scatter_single(mean, gradient)
    mean /= dist.get_world_size()
    momentum.mul_(beta).add_(mean)
    begin = dist.get_rank() * len(momentum)
    mine = weights[begin : begin + len(momentum)]
    mine -= lr * momentum  # in place: a slice is a view
    all_gather_single(weights, mine.clone())


def clip_shards(shards: list[Tensor], max_norm: float) -> float:
    """Add up squares over shards and ranks; then all ranks scale by the same factor."""
    squares = torch.zeros(1, dtype=torch.float64)
    for shard in shards:
        squares += shard.double().pow(2).sum()  # a large square overflows 32 bits
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    if norm > max_norm:
        for shard in shards:
            shard.mul_(max_norm / norm)
    return norm
