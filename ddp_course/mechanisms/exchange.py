"""How ranks exchange tensors: by messages, or through memory that all of them see.

    MessageExchange   all-reduce, all-gather and reduce-scatter, as between any ranks
    MemoryExchange    ranks of one machine: each writes where the others can read it
                      (`memory_exchange`)

Both have the same functions, and who calls them need not know which it is. What they
exchange are activations, which come and go; how shards do is in `shard_exchange`. A
*summand* is a tensor of which only the sum over the ranks means anything; it is
computed where it is sent from, in a `buffer`. All ranks get the same bits, as they add
in the same order. Chapter 09.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import ReduceOp, communicator
from ddp_course.collectives.patience import patient, threads_of
from ddp_course.collectives.port import Port
from ddp_course.mechanisms.shard_exchange import suited


class MessageExchange:
    """The ranks of a group, and how they send each other tensors.

    Args:
        group: the ranks; None are all.
        all_reduce: called as `all_reduce(tensor, op, group=..., async_op=...)`, in
            place. None is PyTorch's: gloo's on the CPU, which is the fastest for
            tensors of the size of activations, and NCCL's on GPUs.

    The first one for a group is made by all its ranks together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] | None = None,
    ) -> None:
        self.group, self.comm, self.port = group, communicator(group), Port(group)
        self.rank, self.size = self.comm.rank, self.comm.size
        self._all_reduce = all_reduce or dist.all_reduce

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
        with nullcontext() if summand.is_cuda else patient(threads_of(self.comm)):
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
        suited("reduce_scatter", out, self.port)(out, parts, group=self.group)
        return out

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the `x` of all ranks, one after the other along `dim`."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = x.new_empty((self.size, *x.shape))
        suited("all_gather", x, self.port)(parts, x, group=self.group)
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


Group: TypeAlias = "dist.ProcessGroup | MessageExchange | None"


def exchange_of(group: Group) -> MessageExchange:
    """Return how the ranks of `group` exchange tensors: by messages, unless told."""
    return group if isinstance(group, MessageExchange) else MessageExchange(group)
