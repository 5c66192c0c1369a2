"""What compressors need of other ranks: three collectives; or one process for them all.

`Exchange` makes them of this course's collectives. `play` lets N compressors run in N
threads of one process, where a collective is a list and a barrier: the same numbers,
bit by bit, as N ranks get if their all-reduce adds in the order of the ranks (as
`naive.through_rank_0` does; with two ranks every all-reduce does). So whoever wants
loss curves and not milliseconds needs no ranks. Chapter 14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import (
    all_gather_single,
    all_to_all_single,
    communicator,
    ring,
)
from ddp_course.mechanisms.comm_hook import GradBucket


class Exchange:
    """The collectives of a group of ranks, on contiguous tensors.

    Args:
        group: the ranks; None are all.
        all_reduce: `ring.all_reduce`, `dist.all_reduce` or another of that form.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] = ring.all_reduce,
    ) -> None:
        self.group, self.all_reduce = group, all_reduce

    @property
    def size(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    def meanwhile(self, job: Callable[[], Tensor]) -> torch.futures.Future[Tensor]:
        """Return a future of what `job` returns, which is done while backward goes on.

        In the group's thread, where collectives that are under way have one order on
        all ranks. PyTorch's all-reduce has its order from who calls it: at once.
        """
        future = torch.futures.Future()

        def work() -> None:
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
                raise

        own = self.all_reduce is not dist.all_reduce
        communicator(self.group).perform(work, async_op=own)
        return future

    def add_up(self, tensor: Tensor) -> None:
        """Make of `tensor` the sum of all ranks', in place."""
        self.all_reduce(tensor, group=self.group)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, [size, ...], in the order of the ranks."""
        everyones = tensor.new_empty(self.size, *tensor.shape)
        all_gather_single(everyones.view(-1), tensor.view(-1), group=self.group)
        return everyones

    def swap(self, rows: Tensor) -> Tensor:
        """Send row r of `rows` [size, ...] to rank r; return what came, row by row."""
        arrived = torch.empty_like(rows)
        all_to_all_single(arrived.view(-1), rows.view(-1), group=self.group)
        return arrived


class Played(Exchange):
    """The same among threads of one process; `table` has a place for each rank."""

    size = 0

    def __init__(self, rank: int, table: list[Any], barrier: Barrier) -> None:
        self.rank, self.table, self.barrier = rank, table, barrier
        self.size = len(table)

    def _all(self, tensor: Tensor) -> list[Tensor]:
        """Show a tensor; return everyone's."""
        self.table[self.rank] = tensor.clone()
        self.barrier.wait()
        everyones = list(self.table)
        self.barrier.wait()
        return everyones

    def add_up(self, tensor: Tensor) -> None:
        """Make of `tensor` the sum of all ranks', in their order."""
        first, *others = self._all(tensor)
        tensor.copy_(first)
        for other in others:
            tensor.add_(other)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return all ranks' tensors, [size, ...]."""
        return torch.stack(self._all(tensor))

    def swap(self, rows: Tensor) -> Tensor:
        """Return every rank's row for this one."""
        return torch.stack([everyones[self.rank] for everyones in self._all(rows)])


def play(
    compressors: Sequence[Any], gradients: Sequence[Sequence[Tensor]], index: int = 0
) -> list[list[Tensor]]:
    """Let one process play all ranks: return the mean gradients that each rank gets.

    `gradients[r]` are those of rank r, all in bucket `index`; they are left alone.
    `compressors[r]` is rank r's, and keeps its memory for the next call.
    """
    table, barrier = [None] * len(compressors), Barrier(len(compressors))

    def rank(r: int) -> list[Tensor]:
        own = gradients[r]
        flat = torch.cat([gradient.reshape(-1) for gradient in own])
        parts = flat.split([gradient.numel() for gradient in own])
        views = [p.view(g.shape) for p, g in zip(parts, own, strict=True)]
        compressors[r].exchange = Played(r, table, barrier)
        try:
            bucket = GradBucket(index, flat, own, views, last=True)
            mean = compressors[r].mean(bucket)
        except BaseException:
            barrier.abort()
            raise
        parts = mean.split([gradient.numel() for gradient in own])
        return [p.view(g.shape) for p, g in zip(parts, own, strict=True)]

    with ThreadPoolExecutor(len(compressors)) as threads:
        return list(threads.map(rank, range(len(compressors))))
