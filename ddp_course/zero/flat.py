"""The memory behind a sharded bucket: parameters that lie side by side in one tensor.

The parameters keep their shapes and their place in the model; only their memory moves.
So what this rank owns is one contiguous part of it, whichever parameters that cuts
through, and an all-gather puts all parts in their places with nothing to copy.
Explained in chapter 07.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import shared_memory
from ddp_course.measure import label
from ddp_course.zero.shards import ShardedBucket
from ddp_course.zero.states import Owned

Empty = Callable[..., Tensor]  # empty(numel, dtype=..., device=...)


class FlatParameters:
    """Moves the parameters of a bucket into `flat`, of which `own` is this rank's part.

    `parameters` has all names of the plan; `empty` makes the memory. `owned` has what
    this rank owns of the parameters: views of `own`, which is all that an optimizer
    need see. Chapter 07.
    """

    @torch.no_grad()
    def __init__(
        self,
        plan: ShardedBucket,
        parameters: Mapping[str, Tensor],
        rank: int,
        empty: Empty,
    ) -> None:
        self.plan = plan
        bucket = plan.bucket
        self.flat = empty(plan.numel, dtype=bucket.dtype, device=bucket.device)
        label(self.flat, "parameters")[bucket.numel :].zero_()
        self.own = shard_of(self.flat, rank, plan)
        self.places: dict[Tensor, int] = {}  # by parameter: its address in `flat`
        for name, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            place = view_of(self.flat, offset, parameters[name])
            parameters[name].data = place.copy_(parameters[name])
            self.places[parameters[name]] = place.data_ptr()
        self.owned = [
            Owned(
                parameters[piece.parameter],
                piece.first,
                piece.last,
                nn.Parameter(self.own[piece.offset :][: piece.last - piece.first]),
            )
            for piece in plan.pieces(rank)
        ]


def empty_in_shared_memory(
    numel: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return memory that all ranks of one machine see, on the CPU whatever `device`."""
    return shared_memory.empty(numel, dtype=dtype, group=group)


def shard_of(flat: Tensor, rank: int, plan: ShardedBucket) -> Tensor:
    """Return the part of a bucket's memory that belongs to `rank`."""
    return flat[rank * plan.shard_numel :][: plan.shard_numel]


def view_of(flat: Tensor, offset: int, parameter: Tensor) -> Tensor:
    """Return a parameter's part of a bucket, laid out as autograd lays its gradient."""
    part = flat[offset : offset + parameter.numel()]
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)
