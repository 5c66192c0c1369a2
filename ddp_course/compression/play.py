"""Run the compressors of N ranks in one process, in N threads.

A collective is a list and a barrier. The results have the same bits as those of N ranks
with an all-reduce that adds in the order of the ranks (as `naive.through_rank_0` does,
and every all-reduce of two ranks). So loss curves need no launch. Chapter 14.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from ddp_course.compression.exchange import Exchange
from ddp_course.mechanisms.comm_hook import GradBucket


class ThreadExchange(Exchange):
    """The collectives among threads of one process; `table` has one entry per rank."""

    size = 0

    def __init__(self, rank: int, table: list[Any], barrier: Barrier) -> None:
        self.rank, self.table, self.barrier = rank, table, barrier
        self.size = len(table)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """Write this rank's tensor to the table; return the tensors of all ranks."""
        self.table[self.rank] = tensor.clone()
        self.barrier.wait()
        rows = list(self.table)
        self.barrier.wait()
        return rows

    def add_up(self, tensor: Tensor) -> None:
        """Sum `tensor` over all ranks, in their order, in place."""
        first, *others = self._all(tensor)
        tensor.copy_(first)
        for other in others:
            tensor.add_(other)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, [size, ...]."""
        return torch.stack(self._all(tensor))

    def swap(self, rows: Tensor) -> Tensor:
        """Return every rank's row for this rank."""
        return torch.stack([other[self.rank] for other in self._all(rows)])


def play(
    compressors: Sequence[Any], gradients: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """Run the compressors of all ranks; return the mean gradients of each rank.

    `gradients[r]` are those of rank r, all in one bucket; they are not changed.
    `compressors[r]` belongs to rank r, and keeps its memory for the next call.
    """
    table, barrier = [None] * len(compressors), Barrier(len(compressors))

    def rank(r: int) -> list[Tensor]:
        own = gradients[r]
        flat = torch.cat([gradient.reshape(-1) for gradient in own])
        parts = flat.split([gradient.numel() for gradient in own])
        views = [p.view(g.shape) for p, g in zip(parts, own, strict=True)]
        compressors[r].exchange = ThreadExchange(r, table, barrier)
        try:
            bucket = GradBucket(0, flat, own, views, last=True)
            mean = compressors[r].mean(bucket)
        except BaseException:
            barrier.abort()
            raise
        parts = mean.split([gradient.numel() for gradient in own])
        return [p.view(g.shape) for p, g in zip(parts, own, strict=True)]

    with ThreadPoolExecutor(len(compressors)) as threads:
        return list(threads.map(rank, range(len(compressors))))
