"""ZeRO stage 1: optimizer states are sharded, to the element.

Two things are better than in `naive`. Shards are equal parts of a flat row of all
parameters, so every rank has 1/N of the states, whatever the parameters are. And since
a rank needs only its own part of the mean gradients, they are reduce-scattered instead
of all-reduced, while backward runs:

    data parallelism   all-reduce gradients                        2 (N - 1) / N
    naive              all-reduce gradients, broadcast parameters  3 (N - 1) / N
    stage 1            reduce-scatter, all-gather                  2 (N - 1) / N

of the parameters' bytes, sent by each rank: the states of the other ranks are saved for
nothing. An all-reduce *is* a reduce-scatter and an all-gather; here the optimizer steps
in between. Read with it: `shards`, who owns what; `mechanisms.engine`, which sends a
bucket when its last gradient has come. Chapter 07.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.collectives import (
    all_gather_single,
    communicator,
    reduce_scatter_single,
)
from ddp_course.measure import label
from ddp_course.mechanisms.buckets import BUCKET_CAP_MB, LiveBucket, view_of
from ddp_course.mechanisms.engine import BucketReducer, Engine
from ddp_course.mechanisms.placements import Flat, place, placed
from ddp_course.mechanisms.recovery import Recovery
from ddp_course.mechanisms.timeline import RecordBackward
from ddp_course.mechanisms.unused import AgreeUnused
from ddp_course.zero.sharded_optimizer import ShardedOptimizer
from ddp_course.zero.shards import ShardedBucket, shard_plan


class Zero1(ShardedOptimizer):
    """Runs `optimizer_class` on 1/N of all elements, with 1/N of its states.

    The parameters of a bucket are moved into one row, of which every rank owns an equal
    part. No DistributedDataParallel is needed: the gradients are averaged here. One
    backward pass for each step, and `zero_grad` between them; what more can be wished
    for has `ZeroRedundancyOptimizer`, which stands on this one.

    Args:
        ending: what becomes of gradients; None is `ReduceScatter`.
        params and all others: as of `ZeroRedundancyOptimizer`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        ending: ReduceScatter | None = None,
        **defaults: Any,
    ) -> None:
        agreed = {"bucket_cap_mb": bucket_cap_mb}
        super().__init__(params, optimizer_class, process_group, defaults, **agreed)
        self.bucket_cap_mb = bucket_cap_mb
        self.ending = ending or ReduceScatter(process_group)
        recovery = Recovery(process_group)
        parts = [RecordBackward(), recovery, AgreeUnused(recovery.show)]
        self.engine = Engine(self.ending, parts)
        self.plan: list[ShardedBucket] = []  # which buckets there are, and whose
        self.rows: list[Tensor] = []  # their parameters
        self.divide()

    @torch.no_grad()
    def take(self, named_parameters: dict[str, Tensor]) -> None:
        """Lay the parameters of each bucket in a row; own 1/N of it."""
        plan = shard_plan(named_parameters.items(), self.world_size, self.bucket_cap_mb)
        for bucket in plan:
            row = label(self.ending.memory(bucket), "parameters")
            for name, offset in zip(bucket.parameters, bucket.offsets, strict=True):
                parameter = named_parameters[name]
                parameter.data = view_of(row, offset, parameter).copy_(parameter)
            own = shard_of(row, self.rank, bucket)
            for piece in bucket.pieces(self.rank):
                parameter, name = named_parameters[piece.parameter], piece.parameter
                mine = nn.Parameter(own[piece.offset :][: piece.last - piece.first])
                where = Flat(piece.first, piece.last)
                place(mine, self.process_group, where, like=parameter, name=name)
                self.owned[parameter] = mine
            self.plan.append(bucket)
            self.rows.append(row)
            self.engine.add(bucket, named_parameters)

    def give_gradients(self) -> None:
        """Let what this rank owns see its part of the gradients."""
        for parameter, mine in self.owned.items():
            gradient = parameter.grad
            if gradient is not None:
                gradient = placed(mine).steps[-1].part(gradient.detach())
            mine.grad = gradient

    def share_parameters(self) -> None:
        """Bring the shards together again, in place, one all-gather for each bucket."""
        for bucket, row in zip(self.plan, self.rows, strict=True):
            self.all_gather(row, shard_of(row, self.rank, bucket))
        for mine in self.owned.values():
            mine.grad = None

    def all_gather(self, row: Tensor, own: Tensor) -> None:
        """Fill a row with every rank's shard; `own` is this rank's part of it."""
        all_gather_single(row, own, group=self.process_group)


class ReduceScatter(BucketReducer):
    """The ending of stage 1: every rank gets its shard of the mean gradients.

    Half of an all-reduce, which would go on to give everybody everything. Afterwards a
    bucket holds the mean in this rank's shard, and something useless in the others:
    what this rank has added to their sums. Every `grad` is a view of its bucket.

    Args:
        group: the ranks that average.
        reduce_scatter: called as `reduce_scatter(own, flat, group=group,
            async_op=True)`, where `own` is this rank's part of `flat`; returns a handle
            to wait for, or None if it is done.
        empty: makes the memory of a bucket: `empty(numel, dtype=..., device=...)`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        reduce_scatter: Callable[..., Any] = reduce_scatter_single,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> None:
        super().__init__(group, empty)
        self.reduce_scatter, self.rank = reduce_scatter, communicator(group).rank

    def memory(self, bucket: ShardedBucket) -> Tensor:
        """Return room for all elements of a bucket, the padding too, all zeros."""
        of = bucket.bucket
        return self.empty(bucket.numel, dtype=of.dtype, device=of.device).zero_()

    def added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Give a bucket memory for all its gradients, all the time."""
        bucket.lie_in(label(self.memory(bucket.plan), "gradients"))

    def own(self, bucket: LiveBucket) -> Tensor:
        """Return this rank's part of a bucket: its shard."""
        return shard_of(bucket.flat, self.rank, bucket.plan)

    def launch(self, bucket: LiveBucket) -> Any:
        """Begin the reduce-scatter of a bucket, in place."""
        return self.reduce_scatter(
            self.own(bucket), bucket.flat, group=self.group, async_op=True
        )


def shard_of(row: Tensor, rank: int, bucket: ShardedBucket) -> Tensor:
    """Return the part of a bucket's memory that belongs to `rank`."""
    return row[rank * bucket.shard_numel :][: bucket.shard_numel]
