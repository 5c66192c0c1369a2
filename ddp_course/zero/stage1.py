"""ZeRO stage 1: each rank stores the optimizer states of an equal 1/N of all elements.

It is better than `naive` in two ways. Shards are equal parts of a flat row of
parameters, so every rank has 1/N of the states, whatever the parameters' sizes. And as
a rank needs only its own shard of the mean gradients, the gradients are
reduce-scattered instead of all-reduced, while backward runs. Each rank sends, as
multiples of the parameters' bytes:

    data parallelism   all-reduce gradients                        2 (N - 1) / N
    naive              all-reduce gradients, broadcast parameters  3 (N - 1) / N
    stage 1            reduce-scatter, all-gather                  2 (N - 1) / N

So stage 1 saves memory without sending more. An all-reduce *is* a reduce-scatter and an
all-gather; here the optimizer steps in between. Read also `shards` (which rank owns
which elements) and `mechanisms.engine`, which launches full buckets. Chapter 07.
"""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.mechanisms.buckets import BUCKET_CAP_MB, LiveBucket, Slot, view_of
from ddp_course.mechanisms.engine import BucketReducer, Engine
from ddp_course.mechanisms.parts import announce
from ddp_course.zero.shards import (
    RowPiece,
    ShardedBucket,
    copy_options,
    names_of,
    shard_of,
    shard_plan,
)

# PyTorch's own collectives, which have other names before PyTorch 2.13.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
NATIVE = SimpleNamespace(all_gather_single=gather, reduce_scatter_single=reduce)


class Zero1(Optimizer):
    """An optimizer that runs `optimizer_class` on this rank's 1/N of all elements.

    The parameters of a bucket are moved into one row, and every rank owns an equal
    shard of it. The model needs no DistributedDataParallel: this class averages the
    gradients, in one backward pass for each step. `ZeroRedundancyOptimizer` is this
    class with parts. Besides the moments of the engine and of the reducer, it announces

        row_made(self, bucket, parameters)  parameters (by name) are views of a new row
        gradients_complete(self)            before gradients are clipped or used
        after_step(self)                    all ranks have the new parameters
        zeroed(self, set_to_none)           `zero_grad` was called

    Args:
        params, optimizer_class, process_group, defaults: as for `naive`. The optimizer
            must step each element by itself (`mechanisms.elementwise`).
        bucket_cap_mb: MiB at which a bucket is closed (`mechanisms.buckets`).
        collectives: a module with `reduce_scatter_single` and `all_gather_single`.
        parts: objects with methods for these moments.
    """

    optim: Optimizer | None = None  # the inner optimizer, for this rank's pieces

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        collectives: Any = NATIVE,
        parts: Iterable[Any] = (),
        **defaults: Any,
    ) -> None:
        super().__init__(params, defaults)
        self.process_group = process_group or dist.group.WORLD
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.bucket_cap_mb, self.collectives = bucket_cap_mb, collectives
        self.parts = tuple(parts)
        self.reducer = self.make_reducer()
        self.engine = Engine(self.reducer, self.parts)
        self.plan: list[ShardedBucket] = []  # all buckets, with the owners' ranges
        self.rows: list[Tensor] = []  # the memory of each bucket's parameters
        self.owned: dict[Tensor, Tensor] = {}  # parameter -> this rank's piece of it

        own = self.divide(self.param_groups)
        self.optim = optimizer_class(own, **defaults)  # only the inner one has states
        self.state, self.defaults = self.optim.state, dict(self.optim.defaults)
        copy_options(self.optim.param_groups, self.param_groups)

    def make_reducer(self) -> BucketReducer:
        """Return the reducer, which handles the engine's full buckets."""
        return ReduceScatterBuckets(self.process_group, self.collectives, self.parts)

    # ---- divide ----------------------------------------------------------------------

    def divide(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Move parameters into rows; return the groups with this rank's pieces only."""
        names = names_of(self.param_groups)
        new = {names[p]: p for group in groups for p in group["params"]}
        for parameter in new.values():
            if not parameter.requires_grad:  # a frozen parameter is in no row
                self.broadcast(parameter, getattr(parameter, "replicas", None))
        for bucket in shard_plan(new.items(), self.world_size, self.bucket_cap_mb):
            self.move_into_row(bucket, new)
            self.engine.add(bucket, new)
        own = []
        for group in groups:
            pieces = [self.owned[p] for p in group["params"] if p in self.owned]
            own.append({"params": pieces})
        copy_options(groups, own)
        return own

    @torch.no_grad()
    def move_into_row(
        self, bucket: ShardedBucket, parameters: dict[str, Tensor]
    ) -> None:
        """Move the parameters of a bucket into one row, and own 1/N of it."""
        row = bucket.zeros()
        for name, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            parameter = parameters[name]
            parameter.data = view_of(row, offset, parameter).copy_(parameter)
        self.broadcast(row, bucket.bucket.group)
        own = shard_of(row, self.rank_in(bucket), bucket)
        for piece in bucket.pieces(self.rank_in(bucket)):
            parameter = parameters[piece.parameter]
            self.owned[parameter] = nn.Parameter(piece.part_of(own))
        self.plan.append(bucket)
        self.rows.append(row)
        announce(self.parts, "row_made", self, bucket, parameters)

    def rank_in(self, bucket: ShardedBucket) -> int:
        """Return this rank's number in the group that divides a bucket."""
        return dist.get_rank(bucket.bucket.group or self.process_group)

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """Copy the values of the group's first rank to all its ranks."""
        numbers = tensor.detach().contiguous()
        dist.broadcast(numbers, group=group or self.process_group, group_src=0)
        tensor.copy_(numbers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to be trained; all ranks must call it."""
        super().add_param_group(param_group)
        if self.optim is not None:  # PyTorch's constructor adds the first groups
            [own] = self.divide(self.param_groups[-1:])
            self.optim.add_param_group(own)
            copy_options(self.optim.param_groups, self.param_groups)

    # ---- step ------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> Any | None:
        """Step this rank's pieces, and all-gather the result; all ranks must call it.

        `closure` computes loss and gradients anew and returns the loss, as in PyTorch;
        other arguments go to the inner optimizer.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.give_gradients()
        copy_options(self.param_groups, self.optim.param_groups)
        self.optim.step(**kwargs)  # 1/N of the work
        copy_options(self.optim.param_groups, self.param_groups)
        self.share_parameters()
        announce(self.parts, "after_step", self)
        return loss

    def give_gradients(self) -> None:
        """Set the `grad` of each piece to its part of the mean gradients."""
        announce(self.parts, "gradients_complete", self)
        for bucket in self.engine.buckets:
            slots = {slot.name: slot for slot in bucket.slots}
            for piece in bucket.plan.pieces(self.rank_in(bucket.plan)):
                slot = slots[piece.parameter]
                mean = self.reducer.mean_of(bucket, slot, piece)
                self.owned[slot.parameter].grad = mean

    def share_parameters(self) -> None:
        """All-gather the shards of the new parameters in place; drop the gradients."""
        for bucket, row in zip(self.plan, self.rows, strict=True):
            own = shard_of(row, self.rank_in(bucket), bucket)
            group = bucket.bucket.group or self.process_group
            self.collectives.all_gather_single(row, own, group=group)
        for piece in self.owned.values():
            piece.grad = None
        # Autograd must raise if a backward needs the old values, so this increments the
        # version counters, as the steps of PyTorch's optimizers do.
        trained = [slot.parameter for slot in self.engine.slots]
        torch.autograd.graph.increment_version(trained)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero."""
        super().zero_grad(set_to_none)
        announce(self.parts, "zeroed", self, set_to_none)


class ReduceScatterBuckets(BucketReducer):
    """A reducer that leaves on every rank the mean of its own shard of a bucket.

    Reduce-scatter is half of an all-reduce; the other half would gather all shards.
    Afterwards a bucket holds the mean in this rank's shard, and partial sums that
    nobody needs in the other shards. Every `grad` is a view of its bucket.

    Args:
        group: the ranks that average; None means all.
        collectives: a module with `reduce_scatter_single`.
        parts: objects with methods for the engine's moments, and for `bucket_added`,
            `pass_begins`, `gradient_ready`, `gradient_kept` and `bucket_arrived`, with
            the arguments of the methods below.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        collectives: Any = NATIVE,
        parts: Iterable[Any] = (),
    ) -> None:
        super().__init__(group)
        self.reduce_scatter = collectives.reduce_scatter_single
        self.parts = parts

    def set_up(self, engine: Engine, bucket: LiveBucket) -> None:
        """Allocate a bucket's memory, which lasts as long as the optimizer."""
        bucket.use_memory(bucket.plan.zeros())
        announce(self.parts, "bucket_added", engine, bucket)

    def pass_begins(self, engine: Engine) -> None:
        """Announce that an averaged backward pass has begun."""
        announce(self.parts, "pass_begins", engine)

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """Write this rank's share of a new gradient into the bucket."""
        announce(self.parts, "gradient_ready", bucket, slot)
        super().pack(bucket, slot)

    def keep(self, bucket: LiveBucket, slot: Slot) -> None:
        """Announce a gradient of a pass that is not averaged."""
        announce(self.parts, "gradient_kept", bucket, slot)

    def own(self, bucket: LiveBucket) -> Tensor:
        """Return this rank's shard of a bucket."""
        rank = dist.get_rank(bucket.plan.bucket.group or self.group)
        return shard_of(bucket.flat, rank, bucket.plan)

    def launch(self, bucket: LiveBucket) -> Any:
        """Begin the reduce-scatter of a bucket, in place."""
        own, group = self.own(bucket), bucket.plan.bucket.group or self.group
        return self.reduce_scatter(own, bucket.flat, group=group, async_op=True)

    def arrived(self, bucket: LiveBucket) -> None:
        """Announce a bucket whose reduction has ended."""
        announce(self.parts, "bucket_arrived", bucket)

    def mean_of(self, bucket: LiveBucket, slot: Slot, piece: RowPiece) -> Tensor | None:
        """Return this rank's piece of a mean gradient; None if there is no gradient."""
        if slot.parameter.grad is None:
            return None
        if slot.parameter.grad is not slot.view:  # the user has replaced it
            slot.parameter.grad = slot.view.copy_(slot.parameter.grad)
        return piece.part_of(self.own(bucket))
