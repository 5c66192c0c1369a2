"""Two ways in which the ranks of a group exchange tensors: messages, or memory.

    Messages      all-reduce, all-gather and reduce-scatter, as between any ranks
    SharedMemory  ranks of one machine: each writes where the others can read it

Tensor parallelism computes a *summand* on every rank: a tensor of which only the sum
over the ranks means anything. Both ways have the same functions:

    room(shape, like)            where to write a summand
    total(summand)               the sum of all ranks' summands, on every rank
    scatter_total(summand, dim)  this rank's part of that sum
    gather(x, dim)               the parts of all ranks, side by side

All ranks get the same bits, as they add in the same order. Chapter 09.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course import collectives
from ddp_course.collectives import ReduceOp, communicator
from ddp_course.collectives.patience import patient


class Messages:
    """The ranks of a group, and how they send each other tensors.

    Args:
        group: the ranks that share a layer; None are all.
        all_reduce: called as `all_reduce(tensor, op, group=..., async_op=...)`, in
            place. None is PyTorch's: gloo's on the CPU, which is the fastest for
            tensors of this size, and NCCL's on GPUs.

    The first one for a group is made by all its ranks together.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] | None = None,
    ) -> None:
        self.group, self.comm = group, communicator(group)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.all_reduce = all_reduce or dist.all_reduce

    def room(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return memory for a summand of this shape, of the type of `like`."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def total(
        self,
        summand: Tensor,
        op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the sum over the ranks; `summand`, from `room`, is used up.

        `meanwhile` is called while the messages are under way.
        """
        if self.size > 1:
            with self._patience(summand):
                told = {"group": self.group, "async_op": meanwhile is not None}
                work = self.all_reduce(summand, op, **told)
                if meanwhile is not None:
                    meanwhile()
                    work.wait()
        elif meanwhile is not None:
            meanwhile()
        return summand

    def scatter_total(self, summand: Tensor, dim: int) -> Tensor:
        """Return this rank's part, along `dim`, of the sum over the ranks.

        `summand`, from `room`, is used up. Raises ValueError if `dim` cannot be cut
        into equal parts.
        """
        parts = [part.contiguous() for part in self.parts(summand, dim)]
        if self.size == 1:
            return parts[0]
        out = torch.empty_like(parts[0])
        # On the CPU this course's own: gloo's sends twice the bytes.
        gpu = summand.is_cuda
        reduce_scatter = dist.reduce_scatter if gpu else collectives.reduce_scatter
        reduce_scatter(out, parts, group=self.group)
        return out

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the `x` of all ranks, one after the other along `dim`."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        all_gather = dist.all_gather if x.is_cuda else collectives.all_gather
        all_gather(parts, x, group=self.group)
        return torch.cat(parts, dim)

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

    def _patience(self, tensor: Tensor) -> Any:
        """Let gloo's threads interrupt nobody while this rank waits for them."""
        return nullcontext() if tensor.is_cuda else patient(self.comm.threads)


Group: TypeAlias = "dist.ProcessGroup | Messages | None"


def exchange_of(group: Group) -> Messages:
    """Return how the ranks of `group` exchange tensors: by messages, unless told."""
    return group if isinstance(group, Messages) else Messages(group)
