"""Two ways in which ranks exchange tensors: messages, or memory that all of them see.

    MessageExchange   all-reduce, all-gather and reduce-scatter, as between any ranks
    MemoryExchange    ranks of one machine: each writes where the others can read it

Both have the same functions, and who calls them need not know which it is. Activations
come and go (chapter 09). A *summand* is a tensor of which only the sum over the ranks
means anything; it is computed where it is sent from:

    buffer(shape, like)            where to write a summand
    all_reduce(summand)            the sum of all ranks' summands, on every rank
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

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course import collectives
from ddp_course.collectives import (
    ReduceOp,
    Work,
    communicator,
    mapping,
    shared_memory,
)
from ddp_course.collectives.patience import patient
from ddp_course.collectives.slices import combine
from ddp_course.measure import active_logs, active_meters, label

ONE_SHOT = 256 << 10  # bytes that each of more than two ranks adds up for itself
KEPT = 256  # views of summands are kept for as many shapes


class MessageExchange:
    """The ranks of a group, and how they send each other tensors.

    Args:
        group: the ranks; None are all.
        all_reduce: called as `all_reduce(tensor, op, group=..., async_op=...)`, in
            place. None is PyTorch's: gloo's on the CPU, which is the fastest for
            tensors of the size of activations, and NCCL's on GPUs.
        all_gather, reduce_scatter: called as `all_gather(whole, own, group=...)` and
            `reduce_scatter(own, whole, group=...)`, perhaps with `async_op`. None are
            this course's on the CPU (gloo's reduce-scatter sends twice the bytes), and
            PyTorch's on GPUs.

    The first one for a group is made by all its ranks together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] | None = None,
        all_gather: Callable[..., Any] | None = None,
        reduce_scatter: Callable[..., Any] | None = None,
    ) -> None:
        self.group, self.comm = group, communicator(group)
        self.rank, self.size = self.comm.rank, self.comm.size
        self._all_reduce = all_reduce or dist.all_reduce
        self._given = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}

    def _collective(self, name: str, tensor: Tensor) -> Callable[..., Any]:
        """Return the all-gather or reduce-scatter to use for tensors like this one."""
        if given := self._given[name]:
            return given
        if not tensor.is_cuda:
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


class MemoryExchange(MessageExchange):
    """The ranks of a group on one machine, who exchange through memory; on the CPU.

    *Activations.* A summand is computed on a page that the others can read, and what is
    left of an all-reduce is to meet, and to add: every rank adds all of them, into
    memory of its own. There are two pages, written in turn. One is written again after
    the next meeting, to which every rank comes when it has read it: so one meeting is
    enough. The pages grow to the largest summand.

    *Shards* lie side by side in memory of all ranks, and are whole as they lie: there
    is nothing to gather, unless they are to be of another type. Nobody may step its
    shard while another rank computes with it: for that they `meet`.

    Args:
        group: the ranks; None are all.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._pages: list[Tensor] = []  # uint8
        self._turn = 0
        # The summands of all ranks on one page, by shape; and those written last.
        self._summands: dict[tuple, list[Tensor]] = {}
        self._written: list[Tensor] = []
        self._wholes: dict[int, Tensor] = {}  # by the address of the own shard

    # ---- activations -----------------------------------------------------------------

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
            length = mapping.round_up(max(nbytes, 1), mapping.PAGE)
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
        self.meet(f"{what} of {summand.dtype} {shape} on page {self._turn}")
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

    # ---- shards ----------------------------------------------------------------------

    def empty_shard(
        self, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for a shard, beside the others'; called by all ranks."""
        nbytes = self.size * numel * dtype.itemsize
        memory = mapping.shared_memory(max(nbytes, 1), self.rank, self.comm.exchange)
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


def allocate(flat: Tensor) -> None:
    """Make the memory of a tensor that had been given back."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def memory_problem(group: dist.ProcessGroup | None, devices: set[str]) -> str | None:
    """Return why ranks with models on these devices can share no memory, or None."""
    comm = communicator(group)
    if others := sorted(devices - {"cpu"}):
        return f"in_shared_memory is True, but the model is on {others[0]}, not cpu"
    if comm.size > 1 and not (len(comm.nodes) == 1 and comm.shares_memory):
        return "in_shared_memory is True, but these ranks share no memory"
    return None


Group: TypeAlias = "dist.ProcessGroup | MessageExchange | None"


def exchange_of(group: Group) -> MessageExchange:
    """Return how the ranks of `group` exchange tensors: by messages, unless told."""
    return group if isinstance(group, MessageExchange) else MessageExchange(group)
