"""How ranks gather shards and sum gradients into them, with this course's collectives.

`gather` and `reduce` may go on while a rank computes: they return an object to wait
for, or None. Over gloo, they send half the bytes of PyTorch's reduce-scatter.
Chapter 08.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.by_plan import ring_all_reduce
from ddp_course.collectives.communicator import Work, communicator
from ddp_course.collectives.port import Port
from ddp_course.collectives.unrooted import all_gather_single, reduce_scatter_single


class ShardMessages:
    """The ranks of a group (None: all), which send each other their shards.

    The first one for a group is constructed by all its ranks together.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group, self.comm, self.port = group, communicator(group), Port(group)
        self.rank, self.size = self.comm.rank, self.comm.size

    def gather(
        self,
        whole: Tensor,
        own: Tensor,
        prepare: Callable[[], None],
        async_op: bool = False,
    ) -> Any:
        """Put every rank's shard into its place in `whole`.

        `prepare()` allocates `whole`, and puts this rank's shard into its place `own`;
        from there it is sent. Collectives of this course that go on meanwhile follow
        each other in a thread. So does `prepare`: the memory for a gather is allocated
        when the reduce-scatter before it has ended and given back its own, and not
        already when this is called.
        """
        all_gather = suited("all_gather", whole, self.port)
        in_turn = async_op and all_gather is all_gather_single
        self.comm.perform(prepare, async_op=True) if in_turn else prepare()
        return all_gather(whole, own, group=self.group, async_op=async_op)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Sum `whole` over all ranks, this rank's part into `own`; then call `then`."""
        reduce_scatter = suited("reduce_scatter", whole, self.port)
        work = reduce_scatter(own, whole, group=self.group, async_op=True)
        if not isinstance(work, Work):
            return _FollowedByWaiter(work, then)

        @torch.no_grad()
        def follow() -> None:  # in the thread of the reduce-scatter
            work.wait()  # it has ended; raise what it raised
            then()

        return self.comm.perform(follow, async_op=True)

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Sum `tensor` over the ranks of another group: the replicas."""
        all_reduce = dist.all_reduce if tensor.is_cuda else ring_all_reduce
        all_reduce(tensor, group=group)


class _FollowedByWaiter:
    """A collective of another kind: whoever waits for it calls `then`."""

    def __init__(self, work: Any, then: Callable[[], None]) -> None:
        self.work, self.then = work, then

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.then()


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
