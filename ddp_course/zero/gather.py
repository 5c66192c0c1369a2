"""Two ways in which shards come together, and gradients apart: messages, or memory.

    Messages      all-gather and reduce-scatter, as between any ranks
    SharedMemory  ranks of one machine: all shards lie where all ranks can read them

Both have the same functions, which `live` and `stage3` call:

    empty(numel, dtype, device)    memory for a shard
    lasting(shard)                 all shards, if they are together all the time
    gather(whole, shard)           every rank's shard into its place in `whole`
    reduce(own, whole)             the sum of all ranks' `whole`, of which this rank
                                   needs, and gets, its own part
    meet(words)                    until all ranks are here

`gather` and `reduce` may go on meanwhile: they return something to wait for, or None.
Chapter 08.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course import collectives
from ddp_course.collectives import communicator, shared_memory


class Messages:
    """Shards come together by an all-gather, gradients are summed by a reduce-scatter.

    Args:
        group: the ranks that share the shards.
        all_gather: called as `all_gather(whole, own, group=..., async_op=...)`, where
            `own` is this rank's part of `whole`. None is this course's for tensors on
            the CPU, and for those on GPUs PyTorch's, which is NCCL's.
        reduce_scatter: the same, as `reduce_scatter(own, whole, group=..., ...)`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        all_gather: Callable[..., Any] | None = None,
        reduce_scatter: Callable[..., Any] | None = None,
    ) -> None:
        self.group, self.comm = group, communicator(group)
        self.all_gather, self.reduce_scatter = all_gather, reduce_scatter

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the memory of a shard."""
        return torch.empty(numel, dtype=dtype, device=device)

    def lasting(self, shard: Tensor) -> Tensor | None:
        """Return what is whole all the time: nothing."""

    def gather(self, whole: Tensor, shard: Tensor, async_op: bool) -> Any:
        """Put every rank's shard into its place in `whole`.

        The own one is cast, and taken to the GPU, on the way to its place; from there
        it is sent.
        """
        own = part_of(whole, self.comm.rank, self.comm.size)
        own.copy_(shard, non_blocking=True)
        all_gather = self.all_gather or _of(whole, "all_gather")
        return all_gather(whole, own, group=self.group, async_op=async_op)

    def reduce(self, own: Tensor, whole: Tensor, async_op: bool) -> Any:
        """Sum `whole` over all ranks, into `own`, which is this rank's part of it."""
        reduce_scatter = self.reduce_scatter or _of(whole, "reduce_scatter")
        return reduce_scatter(own, whole, group=self.group, async_op=async_op)

    def meet(self, words: str) -> None:
        """Messages need no meeting: who has not sent cannot be received from."""


class SharedMemory:
    """All ranks' shards lie side by side in memory that they share; on the CPU only.

    So the shards of a flat are whole as they lie, once for all ranks of the machine,
    and there is nothing to gather: parameters are views of them. Only if they are to be
    of another type, they are copied.

    Nobody may step its shard while another rank computes with it: so all ranks meet
    when a forward begins, and when a forward or backward has ended.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.comm = group, communicator(group)
        self.wholes: dict[int, Tensor] = {}  # by the address of the own shard

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make the memory of a shard; called by all ranks together."""
        rank, size = self.comm.rank, self.comm.size
        # Such memory is made for each rank, and taken from the system when it is used
        # for the first time. Used is that of the first rank only, by all.
        mine = shared_memory.empty(size * numel, dtype=dtype, group=self.group)
        whole = shared_memory.peers(mine, self.group)[0]
        shard = part_of(whole, rank, size)
        self.wholes[shard.data_ptr()] = whole
        return shard

    def lasting(self, shard: Tensor) -> Tensor | None:
        """Return what is whole all the time."""
        return self.wholes[shard.data_ptr()]

    def gather(self, whole: Tensor, shard: Tensor, async_op: bool) -> None:
        """Copy all shards into `whole`; not meanwhile, but now."""
        whole.copy_(self.wholes[shard.data_ptr()])

    def reduce(self, own: Tensor, whole: Tensor, async_op: bool) -> Any:
        """Sum `whole` over all ranks, into `own`, which is this rank's part of it."""
        return shared_memory.reduce_scatter_single(
            own, whole, group=self.group, async_op=async_op
        )

    def meet(self, words: str) -> None:
        """Wait until all ranks are here, for the same."""
        self.comm.perform(lambda: self.comm.agree(words), async_op=False)


def part_of(whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the part of a flat tensor that belongs to `rank`."""
    n = whole.numel() // size
    return whole[rank * n : (rank + 1) * n]


def _of(tensor: Tensor, name: str) -> Callable[..., Any]:
    """Return the collective to use for tensors where this one is."""
    if not tensor.is_cuda:
        return getattr(collectives, f"{name}_single")
    if new := getattr(dist, f"{name}_single", None):  # since torch 2.13
        return new
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "_tensor"}
    return getattr(dist, old[name] if name == "all_gather" else name + old[name])
