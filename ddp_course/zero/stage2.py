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
from typing import Any

import torch
from torch import Tensor

from ddp_course.mechanisms.buckets import LiveBucket, Slot
from ddp_course.mechanisms.engine import BucketReducer, Engine
from ddp_course.mechanisms.parts import announce
from ddp_course.zero.shards import Piece
from ddp_course.zero.stage1 import ReduceScatterBuckets, Zero1

SMALLER_CAP_MB = 4  # buckets that are under way are not sharded, so they are smaller


class Zero2(Zero1):
    """Runs `optimizer_class` on 1/N of all elements, with 1/N of states and gradients.

    As `Zero1`, but after `backward` there is only this rank's shard of the mean
    gradients, and every parameter's `grad` is None. Passes add up, as means.
    """

    buckets_in_flight = 2  # that may have memory at once

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"bucket_cap_mb": SMALLER_CAP_MB, **options})

    def make_reducer(self) -> BucketReducer:
        """Return what the engine does with a full bucket."""
        of = self.process_group, self.collectives, self.parts
        return ReduceScatterAndFree(*of, limit=self.buckets_in_flight)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or make them zeros, in the shards and elsewhere."""
        super().zero_grad(set_to_none)
        self.reducer.zero(set_to_none)


class ReduceScatterAndFree(ReduceScatterBuckets):
    """Give every rank its shard of the mean gradients; keep nothing else.

    Parts hear also `shard_kept(shard)`, and the engine's `before_wait` and `after_wait`
    when backward itself has to wait for a bucket.
    """

    def __init__(self, *args: Any, limit: int = 2) -> None:
        super().__init__(*args)
        self.limit = limit  # buckets that may have memory at once
        self.finished = 0  # buckets of this pass that have given their memory back
        self.opened: set[LiveBucket] = set()  # those that have memory
        self.shards: dict[LiveBucket, Tensor] = {}  # this rank's part of the mean
        self.used: set[Tensor] = set()  # parameters that have a mean gradient

    # ---- allocate --------------------------------------------------------------------

    def added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Lay a bucket out, and free its memory until its turn has come."""
        self.engine = weakref.proxy(engine)
        super().added(engine, bucket)
        self.free(bucket)

    def pass_begins(self, engine: Engine) -> None:
        """Start a backward pass; one before it may have ended in an error."""
        for bucket in self.opened.copy():
            self.free(bucket)
        self.finished = 0
        super().pass_begins(engine)

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """Put this rank's share of a gradient into the bucket, if it has memory."""
        announce(self.parts, "gradient_ready", bucket, slot)
        if self.open(bucket):
            self.move(slot)

    def without(self, bucket: LiveBucket, slot: Slot) -> None:
        """Put zeros in the place of a gradient that has not come in this pass.

        Or the gradient that somebody has put there by hand.
        """
        slot.fresh |= slot.parameter.grad is not None
        self.pack(bucket, slot)

    def move(self, slot: Slot) -> None:
        """Write a gradient, or zeros, into its place, and let go of `grad`."""
        gradient, slot.parameter.grad = slot.parameter.grad, None
        if gradient is None:
            slot.view.zero_()
        else:
            torch.mul(gradient.detach(), self.scale, out=slot.view)

    def open(self, bucket: LiveBucket) -> bool:
        """Allocate a bucket if the window has reached it; tell whether it has any."""
        while (
            bucket.index >= self.finished + self.limit
            and self.finished < self.engine.next
        ):
            self.wait_for(self.engine.buckets[self.finished])
            self.finished += 1
        if bucket not in self.opened and bucket.index < self.finished + self.limit:
            self.opened.add(bucket)
            bucket.flat.untyped_storage().resize_(bucket.plan.nbytes)
            for slot in bucket.slots:
                if slot.here:  # its gradient came before the window
                    self.move(slot)
        return bucket in self.opened

    # ---- wait and free ---------------------------------------------------------------

    def wait_for(self, bucket: LiveBucket) -> None:
        """Wait inside backward, since there is no memory for the next gradients."""
        announce(self.parts, "before_wait", self.engine, bucket)
        self.engine.finish(bucket)
        announce(self.parts, "after_wait", self.engine, bucket)

    def launch(self, bucket: LiveBucket) -> Any:
        """Begin the reduce-scatter of a bucket, in place."""
        self.open(bucket)  # if all its gradients came before the window
        return super().launch(bucket)

    def arrived(self, bucket: LiveBucket) -> None:
        """Keep this rank's shard of the mean, or add it to that of earlier passes."""
        if bucket in self.shards:
            self.shards[bucket].add_(self.own(bucket))
        else:
            self.shards[bucket] = self.own(bucket).clone()
            announce(self.parts, "shard_kept", self.shards[bucket])
        self.free(bucket)
        super().arrived(bucket)

    def free(self, bucket: LiveBucket) -> None:
        """Give the memory back now, whoever may still hold a view of it."""
        self.opened.discard(bucket)
        bucket.flat.untyped_storage().resize_(0)

    def settle(self, engine: Engine) -> None:
        """Let no parameter keep a gradient: all buckets have arrived."""
        for slot in engine.slots:
            slot.parameter.grad = None
            if slot.parameter not in self.unused:
                self.used.add(slot.parameter)

    # ---- what stays ------------------------------------------------------------------

    def mean_of(self, bucket: LiveBucket, slot: Slot, piece: Piece) -> Tensor | None:
        """Return this rank's piece of a mean gradient; None if there is no gradient."""
        if slot.parameter not in self.used:
            return None
        return piece.part_of(self.shards[bucket])

    def zero(self, set_to_none: bool) -> None:
        """Free the shards, or make them zeros."""
        self.engine.recover()  # what a broken pass has left would come later
        if set_to_none:
            self.shards.clear()
            self.used.clear()
        for shard in self.shards.values():
            shard.zero_()
