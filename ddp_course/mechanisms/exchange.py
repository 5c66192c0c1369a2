"""How ranks exchange tensors: by messages, or through memory that all of them see.

    MessageExchange   all-reduce, all-gather and reduce-scatter, as between any ranks
    MemoryExchange    ranks of one machine: each writes where the others can read it
                      (`memory_exchange`)

Both have the same functions, and who calls them need not know which it is. Activations
come and go (chapter 09). A *summand* is a tensor of which only the sum over the ranks
means anything; it is computed where it is sent from:

    buffer(shape, like)            where to write a summand
    all_reduce(summand)            the sum of all ranks' summands, on every rank
    sum(x)                         the same of any tensor, which stays as it is
    reduce_scatter(summand, dim)   this rank's part of that sum
    all_gather(x, dim)             the parts of all ranks, side by side

Shards last, and come together for a while (chapter 08):

    empty_shard(numel, ...)        memory for this rank's shard
    lasting(shard)                 all shards, if they are together all the time
    gather(whole, own, shard)      every rank's shard into its place in `whole`, of
                                   which `own` is this rank's part
    reduce(own, whole, then)       the sum of all ranks' `whole` into `own`, no more
                                   than this rank's part; then call `then`
    meet(words)                    until all ranks are here

`gather` and `reduce` may go on meanwhile: they return something to wait for, or None.
All ranks get the same bits, as they add in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course import collectives
from ddp_course.collectives import ReduceOp, Work, communicator
from ddp_course.collectives.patience import patient
from ddp_course.collectives.port import Port


class MessageExchange:
    """The ranks of a group, and how they send each other tensors.

    Args:
        group: the ranks; None are all.
        all_reduce: called as `all_reduce(tensor, op, group=..., async_op=...)`, in
            place. None is PyTorch's: gloo's on the CPU, which is the fastest for
            tensors of the size of activations, and NCCL's on GPUs.
        all_gather, reduce_scatter: called as `all_gather(whole, own, group=...)` and
            `reduce_scatter(own, whole, group=...)`, perhaps with `async_op`. None are
            this course's over gloo, whose reduce-scatter sends twice the bytes, and
            PyTorch's over NCCL.

    The first one for a group is made by all its ranks together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] | None = None,
        all_gather: Callable[..., Any] | None = None,
        reduce_scatter: Callable[..., Any] | None = None,
    ) -> None:
        self.group, self.comm, self.port = group, communicator(group), Port(group)
        self.rank, self.size = self.comm.rank, self.comm.size
        self._all_reduce = all_reduce or dist.all_reduce
        self._given = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}

    def _collective(self, name: str, tensor: Tensor) -> Callable[..., Any]:
        """Return the all-gather or reduce-scatter to use for tensors like this one."""
        if given := self._given[name]:
            return given
        if not tensor.is_cuda or self.port.staged(tensor):
            return getattr(collectives, f"{name}_single")
        if new := getattr(dist, f"{name}_single", None):  # since torch 2.13
            return new
        old = {"all_gather": "all_gather_into_tensor"}
        return getattr(dist, old.get(name, "reduce_scatter_tensor"))

    # ---- activations -----------------------------------------------------------------

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return memory for a summand of this shape, of the type of `like`."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def all_reduce(
        self,
        summand: Tensor,
        op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the sum over the ranks; `summand`, from `buffer`, is used up.

        `meanwhile` is called while the messages are under way.
        """
        later = meanwhile is not None
        # gloo's threads interrupt nobody while this rank waits for them.
        with nullcontext() if summand.is_cuda else patient(self.comm.threads):
            if self.size > 1:
                work = self._all_reduce(summand, op, group=self.group, async_op=later)
            if later:
                meanwhile()
                if self.size > 1:
                    work.wait()
        return summand

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, which stays as it is."""
        return self.all_reduce(self.buffer(x.shape, x).copy_(x))

    def reduce_scatter(self, summand: Tensor, dim: int) -> Tensor:
        """Return this rank's part, along `dim`, of the sum over the ranks.

        `summand`, from `buffer`, is used up. Raises ValueError if `dim` cannot be cut
        into equal parts.
        """
        if self.size == 1:
            return summand
        parts = torch.stack(self.parts(summand, dim))
        out = torch.empty_like(parts[0])
        self._collective("reduce_scatter", out)(out, parts, group=self.group)
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the `x` of all ranks, one after the other along `dim`."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = x.new_empty((self.size, *x.shape))
        self._collective("all_gather", x)(parts, x, group=self.group)
        return torch.cat(parts.unbind(), dim)

    def parts(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Return every rank's part of `x` along `dim`: views. Nothing is sent.

        Raises ValueError if they would not be equally long.
        """
        length = x.shape[dim]
        if length % self.size:
            raise ValueError(
                f"dimension {dim} of a tensor of shape {tuple(x.shape)} has {length} "
                f"entries, which {self.size} ranks cannot share equally; it must be a "
                f"multiple of {self.size}"
            )
        return x.split(length // self.size, dim)

    # ---- shards ----------------------------------------------------------------------

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

        The own one is cast, and taken to the GPU, on the way to its place; from there
        it is sent. Collectives of this course that go on meanwhile follow each other in
        a thread. So does the memory for a gather: it is made when the reduce-scatter
        before it has ended and given back its own, and not already when it is called.
        """

        @torch.no_grad()
        def prepare() -> None:
            allocate(whole)
            own.copy_(shard, non_blocking=True)

        all_gather = self._collective("all_gather", whole)
        in_turn = async_op and all_gather is collectives.all_gather_single
        self.comm.perform(prepare, async_op=True) if in_turn else prepare()
        return all_gather(whole, own, group=self.group, async_op=async_op)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Sum `whole` over all ranks, into `own`; then call `then`."""
        reduce_scatter = self._collective("reduce_scatter", whole)
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


Group: TypeAlias = "dist.ProcessGroup | MessageExchange | None"


def exchange_of(group: Group) -> MessageExchange:
    """Return how the ranks of `group` exchange tensors: by messages, unless told."""
    return group if isinstance(group, MessageExchange) else MessageExchange(group)
