"""Exchange activations among the ranks of a group, by PyTorch's collectives.

A *summand* is a rank's partial result: only its sum over the ranks is meaningful. It is
computed in a `buffer`, and summed there. After an all-reduce all ranks have the same
bits. The collectives of shards are in `shard_collectives`. Chapter 09.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor


class MessageExchange:
    """The collectives of activations within a group.

    Args:
        group: the ranks; None: all ranks.
        all_reduce: called as `all_reduce(tensor, op, group=..., async_op=...)`, in
            place; None: PyTorch's.
        waiting: returns a context in which this rank waits for messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] | None = None,
        waiting: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup | None):
            raise ValueError(f"group is {group!r}; it must be a process group or None")
        self.group, self.waiting = group, waiting
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.launch = all_reduce or dist.all_reduce

    def buffer(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return memory for a summand of this shape, of the type of `like`."""
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def all_reduce(
        self,
        summand: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        compute: Callable[[], None] | None = None,
    ) -> Tensor:
        """Return the sum over the ranks, in the memory of `summand`.

        Calls `compute`, if any, between launching the all-reduce and waiting for it.
        """
        later = compute is not None
        with self.waiting():
            if self.size > 1:
                work = self.launch(summand, op, group=self.group, async_op=later)
            if later:
                compute()
                if self.size > 1:
                    work.wait()
        return summand

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks; `x` does not change."""
        return self.all_reduce(self.buffer(x.shape, x).copy_(x))

    def reduce_scatter(self, summand: Tensor, dim: int) -> Tensor:
        """Return this rank's part, along `dim`, of the sum over the ranks.

        gloo's own reduce-scatter is an all-reduce, which sends twice as many bytes; so
        over gloo each rank sends every other rank its part, and adds what it receives.
        Raises ValueError if `dim` cannot be cut into equal parts.
        """
        if self.size == 1:
            return summand
        parts = torch.stack(self.parts(summand, dim))  # (N, ..., length/N, ...)
        with self.waiting():
            if dist.get_backend(self.group) == "nccl":
                out = torch.empty_like(parts[0])
                dist.reduce_scatter_tensor(out, parts.flatten(0, 1), group=self.group)
                return out
            received = torch.empty_like(parts)
            dist.all_to_all_single(received, parts, group=self.group)
        return received.sum(0, dtype=received.dtype)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the `x` of all ranks, one after the other along `dim`."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self.waiting():
            dist.all_gather(parts, x, group=self.group)
        return torch.cat(parts, dim)

    def parts(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Return every rank's part of `x` along `dim`, as views. Nothing is sent.

        Raises ValueError if the parts would not be equally long.
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
    """Return `group` if it is an exchange, else an exchange between its ranks."""
    return group if isinstance(group, MessageExchange) else MessageExchange(group)
