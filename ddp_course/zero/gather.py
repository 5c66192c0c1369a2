"""Two ways in which shards come together, and gradients apart: messages, or memory.

    Messages      all-gather and reduce-scatter, as between any ranks
    SharedMemory  ranks of one machine: all shards lie where all ranks can read them

Both have the same functions, which `live` and `stage3` call:

    empty(numel, dtype, device)  memory for a shard
    lasting(shard)               all shards, if they are together all the time
    gather(whole, own, shard)    every rank's shard into its place in `whole`, of which
                                 `own` is this rank's part
    reduce(own, whole, then)     the sum of all ranks' `whole` into `own`, no more than
                                 this rank's part; then call `then`
    meet(words)                  until all ranks are here

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
from ddp_course.collectives import Work, communicator, mapping, shared_memory


class Messages:
    """Shards come together by an all-gather, gradients are summed by a reduce-scatter.

    This course's collectives, if they are to go on meanwhile, follow each other in a
    thread. So does what has to be done before or after one: the memory for a gather is
    made when the reduce-scatter before it has ended and given back its own, and not
    already when it is called.

    Args:
        group: the ranks that share the shards.
        all_gather: called as `all_gather(whole, own, group=..., async_op=...)`. None is
            this course's on the CPU, and PyTorch's, which is NCCL's, on GPUs.
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

    def gather(
        self, whole: Tensor, own: Tensor, shard: Tensor, async_op: bool = False
    ) -> Any:
        """Put every rank's shard into its place in `whole`, whose memory is made.

        The own one is cast, and taken to the GPU, on the way to its place; from there
        it is sent.
        """

        @torch.no_grad()
        def prepare() -> None:
            allocate(whole)
            own.copy_(shard, non_blocking=True)

        all_gather = self.all_gather or _of(whole, "all_gather")
        in_turn = async_op and all_gather is collectives.all_gather_single
        self.comm.perform(prepare, async_op=True) if in_turn else prepare()
        return all_gather(whole, own, group=self.group, async_op=async_op)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Sum `whole` over all ranks, into `own`; then call `then`."""
        reduce_scatter = self.reduce_scatter or _of(whole, "reduce_scatter")
        work = reduce_scatter(own, whole, group=self.group, async_op=True)
        if isinstance(work, Work):
            return _in_turn(self.comm, work, then)
        return _AtTheEnd(work, then)

    def meet(self, words: str) -> None:
        """Messages need no meeting: what has not been sent cannot be received."""


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
        nbytes = max(1, size * numel * dtype.itemsize)
        memory = mapping.shared_memory(nbytes, rank, self.comm.exchange)
        whole = memory[: size * numel * dtype.itemsize].view(dtype)
        shard = part_of(whole, rank, size)
        self.wholes[shard.data_ptr()] = whole
        return shard

    def lasting(self, shard: Tensor) -> Tensor | None:
        """Return what is whole all the time."""
        return self.wholes[shard.data_ptr()]

    def gather(
        self, whole: Tensor, own: Tensor, shard: Tensor, async_op: bool = False
    ) -> None:
        """Copy all shards into `whole`; not meanwhile, but now."""
        allocate(whole)
        whole.copy_(self.wholes[shard.data_ptr()])

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Sum `whole` over all ranks, into `own`; then call `then`."""
        work = shared_memory.reduce_scatter_single(
            own, whole, group=self.group, async_op=True
        )
        return _in_turn(self.comm, work, then)

    def meet(self, words: str) -> None:
        """Wait until all ranks are here, for the same."""
        self.comm.agree_now(words)


def part_of(whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the part of a flat tensor that belongs to `rank`."""
    n = whole.numel() // size
    return whole[rank * n : (rank + 1) * n]


def allocate(flat: Tensor) -> None:
    """Make the memory of a tensor that had been given back."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def _in_turn(comm: Any, work: Work, then: Callable[[], None]) -> Work:
    """Call `then` after `work`, in the same thread; return what to wait for."""

    @torch.no_grad()
    def follow() -> None:
        work.wait()  # it has ended; raise what it raised
        then()

    return comm.perform(follow, async_op=True)


class _AtTheEnd:
    """A collective of another kind: who waits for it does what is to be done then."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self.work, self.then = work, then

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.then()


def _of(tensor: Tensor, name: str) -> Callable[..., Any]:
    """Return the collective to use for tensors where this one is."""
    if not tensor.is_cuda:
        return getattr(collectives, f"{name}_single")
    if new := getattr(dist, f"{name}_single", None):  # since torch 2.13
        return new
    old = {"all_gather": "all_gather_into_tensor"}
    return getattr(dist, old.get(name, "reduce_scatter_tensor"))
