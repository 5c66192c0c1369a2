"""How ranks bring shards together for a while, and sum gradients into them.

Shards last; what is whole comes and goes. `gather` and `reduce` may go on meanwhile:
they return something to wait for, or None. Here they are messages;
`memory_exchange.ShardMemory` does the same in memory that all ranks of one machine see.
Chapter 08.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import (
    Work,
    all_gather_single,
    communicator,
    reduce_scatter_single,
)
from ddp_course.collectives.port import Port


class ShardMessages:
    """The ranks of a group (None: all), which send each other their shards.

    The first one for a group is made by all its ranks together.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.comm, self.port = group, communicator(group), Port(group)
        self.rank, self.size = self.comm.rank, self.comm.size

    def empty_shard(
        self, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for a shard."""
        return torch.empty(numel, dtype=dtype, device=device)

    def lasting(self, shard: Tensor) -> Tensor | None:
        """Return what is whole all the time: nothing."""

    def gather(
        self, whole: Tensor, own: Tensor, shard: Tensor, async_op: bool = False
    ) -> Any:
        """Put every rank's shard into its place in `whole`, whose memory is made.

        The own one is cast, and taken to the GPU, on the way to its place, `own`; from
        there it is sent. Collectives of this course that go on meanwhile follow each
        other in a thread. So does the memory for a gather: it is made when the
        reduce-scatter before it has ended and given back its own, and not already when
        it is called.
        """

        @torch.no_grad()
        def prepare() -> None:
            allocate(whole)
            own.copy_(shard, non_blocking=True)

        all_gather = suited("all_gather", whole, self.port)
        in_turn = async_op and all_gather is all_gather_single
        self.comm.perform(prepare, async_op=True) if in_turn else prepare()
        return all_gather(whole, own, group=self.group, async_op=async_op)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Sum `whole` over all ranks, this rank's part into `own`; then call `then`."""
        reduce_scatter = suited("reduce_scatter", whole, self.port)
        work = reduce_scatter(own, whole, group=self.group, async_op=True)
        return self._followed(work, then)

    def meet(self, words: str) -> None:
        """Messages need no meeting: what has not been sent cannot be received."""

    def _followed(self, work: Any, then: Callable[[], None]) -> Any:
        """Return what is to be waited for: `work`, and `then` after it."""
        if not isinstance(work, Work):
            return _FollowedByWaiter(work, then)

        @torch.no_grad()
        def follow() -> None:  # in the same thread as what `work` is
            work.wait()  # it has ended; raise what it raised
            then()

        return self.comm.perform(follow, async_op=True)


class _FollowedByWaiter:
    """A collective of another kind: who waits for it does what is to be done then."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self.work, self.then = work, then

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.then()


def allocate(flat: Tensor) -> None:
    """Make the memory of a tensor that had been given back."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def suited(name: str, tensor: Tensor, port: Port) -> Callable[..., Any]:
    """Return the "all_gather" or "reduce_scatter" to use for tensors like this one.

    This course's over gloo, whose reduce-scatter sends twice the bytes, and PyTorch's
    over NCCL; the own part and the whole are its first two arguments.
    """
    if not tensor.is_cuda or port.staged(tensor):
        ours = {"all_gather": all_gather_single}
        return ours.get(name, reduce_scatter_single)
    if new := getattr(dist, f"{name}_single", None):  # since torch 2.13
        return new
    old = {"all_gather": "all_gather_into_tensor"}
    return getattr(dist, old.get(name, "reduce_scatter_tensor"))
