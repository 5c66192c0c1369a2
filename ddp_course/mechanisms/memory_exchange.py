"""Ranks of one machine exchange tensors through memory that all see; on the CPU.

*Shards* lie side by side in memory of all ranks, and are whole as they lie: there is
nothing to gather, unless they are to be of another type. Nobody may step its shard
while another rank computes with it: for that they `meet`. Chapter 08.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import allocator, communicator, shared_memory
from ddp_course.mechanisms.shard_exchange import ShardMessages, allocate


class ShardMemory(ShardMessages):
    """The ranks of a group (None: all) on one machine, whose shards lie together."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._wholes: dict[int, Tensor] = {}  # by the address of the own shard

    def empty_shard(
        self, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for a shard, beside the others'; called by all ranks."""
        nbytes = self.size * numel * dtype.itemsize
        memory = allocator.allocate(max(nbytes, 1), self.rank, self.comm.exchange)
        whole = memory[:nbytes].view(dtype)
        shard = whole[self.rank * numel :][:numel]
        self._wholes[shard.data_ptr()] = whole
        return shard

    def lasting(self, shard: Tensor) -> Tensor | None:
        """Return what is whole all the time."""
        return self._wholes[shard.data_ptr()]

    def gather(
        self, whole: Tensor, own: Tensor, shard: Tensor, async_op: bool = False
    ) -> None:
        """Copy all shards into `whole`; not meanwhile, but now."""
        allocate(whole)
        whole.copy_(self._wholes[shard.data_ptr()])

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Sum `whole` over all ranks, into `own`; then call `then`."""
        reduce_scatter = shared_memory.reduce_scatter_single
        work = reduce_scatter(own, whole, group=self.group, async_op=True)
        return self._followed(work, then)

    def meet(self, words: str) -> None:
        """Wait until all ranks are here, for the same."""
        self.comm.agree_now(words)


def empty_for_all(group: dist.ProcessGroup | None) -> Callable[..., Tensor]:
    """Return what makes memory that all ranks see, called as `torch.empty`.

    Raises ValueError for another device than the CPU.
    """

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            told = f"buckets_in_shared_memory is True, but the model is on {device}"
            raise ValueError(f"{told}, not cpu")
        return shared_memory.empty(numel, dtype=dtype, group=group)

    return empty


def memory_problem(group: dist.ProcessGroup | None, devices: set[str]) -> str | None:
    """Return why ranks with models on these devices can share no memory, or None."""
    comm = communicator(group)
    if others := sorted(devices - {"cpu"}):
        return f"in_shared_memory is True, but the model is on {others[0]}, not cpu"
    if comm.size > 1 and not (len(comm.nodes) == 1 and comm.shares_memory):
        return "in_shared_memory is True, but these ranks share no memory"
    return None
