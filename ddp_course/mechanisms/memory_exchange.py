"""Ranks of one machine exchange tensors through memory that all see; on the CPU.

*Activations.* A summand is computed on a page that the others can read, and what is
left of an all-reduce is to meet, and to add: every rank adds all of them, into memory
of its own. There are two pages, written in turn. One is written again after the next
meeting, to which every rank comes when it has read it: so one meeting is enough. The
pages grow to the largest summand. Chapter 09.

*Shards* lie side by side in memory of all ranks, and are whole as they lie: there is
nothing to gather, unless they are to be of another type. Nobody may step its shard
while another rank computes with it: for that they `meet`. Chapter 08.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import ReduceOp, allocator, communicator, shared_memory
from ddp_course.collectives.staging import combine
from ddp_course.measure import active_logs, active_meters, label
from ddp_course.mechanisms.exchange import MessageExchange
from ddp_course.mechanisms.shard_exchange import ShardMessages, allocate

ONE_SHOT = 256 << 10  # bytes that each of more than two ranks adds up for itself
KEPT = 256  # views of summands are kept for as many shapes


class MemoryExchange(MessageExchange):
    """The ranks of a group (None: all) on one machine, who exchange through memory."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._pages: list[Tensor] = []  # uint8
        self._turn = 0
        # The summands of all ranks on one page, by shape; and those written last.
        self._summands: dict[tuple, list[Tensor]] = {}
        self._written: list[Tensor] = []

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return this rank's part of the page whose turn it is, for one summand."""
        if self.size == 1:
            return super().buffer(shape, like)
        self._turn = 1 - self._turn
        key = self._turn, tuple(shape), like.dtype
        if key not in self._summands:
            self._summands[key] = self._divide(*key)
        self._written = self._summands[key]
        return self._written[self.rank]

    def _divide(
        self, turn: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> list[Tensor]:
        """See a page of every rank as a summand; make larger ones if need be."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not self._pages or nbytes > self._pages[0].numel():
            for page in self._pages:
                shared_memory.free(page, self.group)
            how = {"dtype": torch.uint8, "group": self.group}
            length = allocator.round_up(max(nbytes, 1), allocator.PAGE)
            pages = [shared_memory.empty(length, **how) for _ in range(2)]
            self._pages = [label(page, "communication buffers") for page in pages]
            self._summands.clear()
        if len(self._summands) >= KEPT:
            self._summands.clear()
        ranks = shared_memory.peers(self._pages[turn][:nbytes], self.group)
        return [rank.view(dtype).view(shape) for rank in ranks]

    def _meet_with(self, what: str, summand: Tensor) -> list[Tensor]:
        """Wait until all ranks have written theirs; the same, and on the same page."""
        shape = [*self._own(summand).shape]
        words = f"{what} of {summand.dtype} {shape} on page {self._turn}"
        self.comm.agree_now(words)
        return self._written

    def _own(self, summand: Tensor) -> Tensor:
        own = self._written[self.rank] if self._written else None
        if own is None or own.data_ptr() != summand.data_ptr():
            raise RuntimeError("a summand must be written into `buffer` to be summed")
        return summand

    def all_reduce(
        self,
        summand: Tensor,
        op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the sum; `meanwhile` is called first: who comes last never waits."""
        if meanwhile is not None:
            meanwhile()
        if self.size == 1:
            return summand
        if self.size > 2 and summand.nbytes > ONE_SHOT:  # each adds up a slice
            shared_memory.all_reduce(self._own(summand), op, self.group)
            return summand.clone()
        start, summands = time.perf_counter(), self._meet_with("all_reduce", summand)
        out = torch.empty_like(summand)
        combine(summands, op, out)
        self._tell("all_reduce", start, summand.nbytes)
        return out

    def reduce_scatter(self, summand: Tensor, dim: int) -> Tensor:
        """Return this rank's part, along `dim`, of the sum over the ranks."""
        if self.size == 1:
            return summand
        self.parts(summand, dim)  # ValueError if they cannot be equal
        start = time.perf_counter()
        summands = self._meet_with("reduce_scatter", summand)
        inputs = [self.parts(tensor, dim)[self.rank] for tensor in summands]
        out = torch.empty(inputs[0].shape, dtype=summand.dtype)
        combine(inputs, ReduceOp.SUM, out)
        self._tell("reduce_scatter", start, out.nbytes)
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the `x` of all ranks, one after the other along `dim`."""
        if self.size == 1:
            return x
        start = time.perf_counter()
        parts = self._meet_with("all_gather", self.buffer(x.shape, x).copy_(x))
        out = torch.cat(parts, dim)
        self._tell("all_gather", start, x.nbytes)
        return out

    def _tell(self, what: str, start: float, nbytes: int) -> None:
        """Tell meters what went to each other rank, and logs when."""
        others = [rank for rank in self.comm.ranks if rank != dist.get_rank()]
        for meter in active_meters():
            for rank in others:
                meter.count_sent(rank, nbytes)
                meter.count_received(rank, nbytes)
        for log in active_logs():
            end, sent = time.perf_counter(), nbytes * len(others)
            log.add(what, start, end, sent, lane="communication")


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
