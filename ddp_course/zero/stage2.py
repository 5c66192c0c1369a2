"""ZeRO stage 2: gradients are sharded, too.

Of the mean gradients a rank needs its own part only, so why keep the rest? In stage 1
every bucket has its memory all the time. Here it is there from the bucket's first
gradient to the end of its reduce-scatter; what stays is this rank's shard of the mean.
No `grad` outlives its own arrival: the parameters' `grad` are None.

                   parameters   gradients         optimizer states    bytes sent
    stage 1        P            P                 O / N               2 (N - 1) / N P
    stage 2        P            P / N + buckets   O / N               2 (N - 1) / N P

where P are the bytes of the parameters, and O those of one process' optimizer states.
How many buckets may have memory at once is bounded: a window that moves over them in
the order in which they are launched. With room for two, one bucket is on its way while
the next one fills:

    bucket     0 1 2 3 4      a gradient of bucket 2 comes: bucket 0 is waited for, and
    memory     # #            gives its memory back; what stays is this rank's shard of
                 # #          the mean. One of bucket 4 would stay where autograd has
                   # #        put it, until the window is there.

What one gives up is adding up gradients before they are averaged: that needs all of
them on every rank. Every backward pass costs its reduce-scatter. Rajbhandari et al.
2020, "ZeRO", sections 5.2 and 7.2.1. Chapter 07.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.measure import label
from ddp_course.mechanisms.buckets import LiveBucket, Slot
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.parts import announce
from ddp_course.zero.stage1 import ReduceScatter, Zero1

SMALLER_CAP_MB = 4  # what is on its way is not sharded, so buckets are smaller here


class Zero2(Zero1):
    """Runs `optimizer_class` on 1/N of all elements, with 1/N of states and gradients.

    As `Zero1`, but after `backward` there is only this rank's shard of the mean
    gradients, and every parameter's `grad` is None. Passes add up, as means.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        options = {"bucket_cap_mb": SMALLER_CAP_MB, **options}
        options.setdefault("ending", ReduceScatterAndFree(process_group))
        super().__init__(params, optimizer_class, process_group, **options)

    def give_gradients(self) -> None:
        """Let what this rank owns see its part of the shards."""
        parameters = {slot.name: slot.parameter for slot in self.engine.slots}
        for bucket, shard in self.ending.shards.items():
            for piece in bucket.plan.pieces(self.rank):
                part = shard[piece.offset :][: piece.last - piece.first]
                self.owned[parameters[piece.parameter]].grad = part

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or make them zeros, in the shards and elsewhere."""
        super().zero_grad(set_to_none)
        self.ending.zero(set_to_none)


class ReduceScatterAndFree(ReduceScatter):
    """The ending of stage 2: a shard of the mean is all that stays."""

    limit = 2  # buckets that may have memory at once

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.finished = 0  # buckets of this pass that have given their memory back
        self.opened: set[LiveBucket] = set()  # those that have memory
        self.shards: dict[LiveBucket, Tensor] = {}  # this rank's part of the mean

    # ---- memory comes ----------------------------------------------------------------

    def added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Lay a bucket out, in memory that is given back until its turn has come."""
        self.engine, of = weakref.proxy(engine), bucket.plan.bucket
        flat = torch.empty(bucket.plan.numel, dtype=of.dtype, device=of.device)
        bucket.lie_in(label(flat, "communication buffers"))
        self.free(bucket)

    def pass_begins(self, engine: Engine) -> None:
        """A backward pass begins; one before it may have ended in an error."""
        for bucket in self.opened.copy():
            self.free(bucket)
        self.finished = 0

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """Put this rank's share of a gradient into the bucket, if it has memory."""
        if self.open(bucket):
            self.move(slot)

    def without(self, bucket: LiveBucket, slot: Slot) -> None:
        """None has come in this pass; somebody may have put one there."""
        slot.fresh |= slot.parameter.grad is not None
        self.pack(bucket, slot)

    def move(self, slot: Slot) -> None:
        """Write a parameter's share, which may be nothing, and let go of its grad."""
        gradient, slot.parameter.grad = slot.parameter.grad, None
        if gradient is None:
            slot.view.zero_()
        else:
            torch.mul(gradient.detach(), self.scale, out=slot.view)

    def open(self, bucket: LiveBucket) -> bool:
        """Give a bucket its memory if the window is there; tell whether it has it."""
        turn = self.engine.buckets.index(bucket)
        while turn >= self.finished + self.limit and self.finished < self.engine.next:
            self.wait_for(self.engine.buckets[self.finished])
            self.finished += 1
        if bucket not in self.opened and turn < self.finished + self.limit:
            self.opened.add(bucket)
            self.allocate(bucket)
            for slot in bucket.slots:
                if slot.here:  # it came before the window
                    self.move(slot)
        return bucket in self.opened

    def allocate(self, bucket: LiveBucket) -> None:
        """Give a bucket its memory."""
        bucket.flat.untyped_storage().resize_(bucket.plan.nbytes)

    # ---- and goes --------------------------------------------------------------------

    def wait_for(self, bucket: LiveBucket) -> None:
        """Backward has to wait here, since there is no memory for its gradients."""
        announce(self.engine.parts, "before_wait", self.engine, bucket)
        self.engine.finish(bucket)
        announce(self.engine.parts, "after_wait", self.engine, bucket)

    def launch(self, bucket: LiveBucket) -> Any:
        """Begin the reduce-scatter of a bucket, in place."""
        self.open(bucket)  # if all its gradients came before the window
        return super().launch(bucket)

    def arrived(self, bucket: LiveBucket) -> None:
        """Keep this rank's shard of the mean, or add it to that of earlier passes."""
        if bucket in self.shards:
            self.shards[bucket].add_(self.own(bucket))
        else:
            self.shards[bucket] = label(self.own(bucket).clone(), "gradients")
        self.free(bucket)

    def free(self, bucket: LiveBucket) -> None:
        """Give the memory back now, whoever may still hold a view of it."""
        self.opened.discard(bucket)
        bucket.flat.untyped_storage().resize_(0)

    def settle(self, engine: Engine) -> None:
        """All buckets have arrived; no parameter keeps a gradient."""
        super().settle(engine)
        for slot in engine.slots:
            slot.parameter.grad = None

    def zero(self, set_to_none: bool) -> None:
        """Let go of the shards, or make them zeros."""
        self.engine.recover()
        if set_to_none:
            self.shards.clear()
        for shard in self.shards.values():
            shard.zero_()
