"""ZeRO stage 2: gradients are sharded, too.

A rank needs only its own shard of the mean gradients, so why store the rest? In stage 1
every bucket has memory all the time. Here a bucket has memory from its first gradient
to the end of its reduce-scatter; after that, only this rank's shard of the mean is
stored. Every `grad` is None: each gradient is written into its bucket and dropped.

                   parameters   gradients         optimizer states    bytes sent
    stage 1        P            P                 O / N               2 (N - 1) / N P
    stage 2        P            P / N + buckets   O / N               2 (N - 1) / N P

where P is the parameters' size in bytes, and O that of one process's optimizer states.
Only `buckets_in_flight` buckets may have memory at once: a window that moves over the
buckets in launch order. With a window of two, one bucket is being sent while the next
one fills:

    bucket     0 1 2 3 4      With the first gradient of bucket 2, the reducer waits for
    memory     # #            bucket 0, keeps this rank's shard of its mean, and frees
                 # #          it. A gradient of bucket 4 would stay in `grad` until the
                   # #        window reaches bucket 4.

The price: gradients cannot be accumulated before they are averaged, as accumulation
needs whole gradients on every rank. So every backward pass sends its buckets.
Rajbhandari et al. 2020, "ZeRO", sections 5.2 and 7.2.1. Chapter 07.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from ddp_course.mechanisms.buckets import LiveBucket, Slot
from ddp_course.mechanisms.engine import BucketReducer, Engine
from ddp_course.mechanisms.parts import announce
from ddp_course.zero.shards import RowPiece
from ddp_course.zero.stage1 import ReduceScatterBuckets, Zero1

SMALLER_CAP_MB = 4  # a bucket in flight is not sharded: smaller ones save memory


class Zero2(Zero1):
    """An optimizer that stores 1/N of the states and of the mean gradients.

    Unlike with `Zero1`, after `backward` a rank has only its shard of the mean
    gradients, and every parameter's `grad` is None. The means of several backward
    passes add up.
    """

    buckets_in_flight = 2  # buckets that may have memory at once

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"bucket_cap_mb": SMALLER_CAP_MB, **options})

    def make_reducer(self) -> BucketReducer:
        """Return the reducer, which handles the engine's full buckets."""
        args = self.process_group, self.collectives, self.parts
        return ReduceScatterAndFree(*args, limit=self.buckets_in_flight)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero, in the shards and elsewhere."""
        super().zero_grad(set_to_none)
        self.reducer.zero(set_to_none)


class ReduceScatterAndFree(ReduceScatterBuckets):
    """A reducer that stores this rank's shards of the mean, and frees the buckets.

    It also announces `shard_kept(shard)`, and the engine's `before_wait` and
    `after_wait` when backward itself has to wait for a bucket.
    """

    def __init__(self, *args: Any, limit: int = 2) -> None:
        super().__init__(*args)
        self.limit = limit  # the window: buckets that may have memory at once
        self.finished = 0  # number of buckets that this pass has reduced and freed
        self.opened: set[LiveBucket] = set()  # buckets that have memory
        self.shards: dict[LiveBucket, Tensor] = {}  # this rank's part of the mean
        self.used: set[Tensor] = set()  # parameters that have a mean gradient

    # ---- allocate --------------------------------------------------------------------

    def set_up(self, engine: Engine, bucket: LiveBucket) -> None:
        """Assign a bucket's views, and free its memory until `open` allocates it."""
        self.engine = weakref.proxy(engine)
        super().set_up(engine, bucket)
        self.free(bucket)

    def pass_begins(self, engine: Engine) -> None:
        """Free all buckets: the previous pass may have ended in an error."""
        for bucket in self.opened.copy():
            self.free(bucket)
        self.finished = 0
        super().pass_begins(engine)

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """Write this rank's share of a gradient into the bucket, if it has memory."""
        announce(self.parts, "gradient_ready", bucket, slot)
        if self.open(bucket):
            self.move(slot)

    def pack_missing(self, bucket: LiveBucket, slot: Slot) -> None:
        """Write zeros for a parameter that got no gradient in this pass.

        If the user has set its `grad` by hand, that gradient is written instead.
        """
        slot.fresh |= slot.parameter.grad is not None
        self.pack(bucket, slot)

    def move(self, slot: Slot) -> None:
        """Write a gradient, or zeros, into the slot, and set `grad` to None."""
        gradient, slot.parameter.grad = slot.parameter.grad, None
        if gradient is None:
            slot.view.zero_()
        else:
            torch.mul(gradient.detach(), self.scale, out=slot.view)

    def open(self, bucket: LiveBucket) -> bool:
        """Allocate a bucket if the window reaches it; return whether it has memory."""
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
                if slot.filled:  # its gradient had to wait in `grad`
                    self.move(slot)
        return bucket in self.opened

    # ---- wait and free ---------------------------------------------------------------

    def wait_for(self, bucket: LiveBucket) -> None:
        """Wait for a bucket inside backward: the window must move to the next one."""
        announce(self.parts, "before_wait", self.engine, bucket)
        self.engine.finish(bucket)
        announce(self.parts, "after_wait", self.engine, bucket)

    def launch(self, bucket: LiveBucket) -> Any:
        """Begin the reduce-scatter of a bucket, in place."""
        self.open(bucket)  # it has no memory if all its gradients waited in `grad`
        return super().launch(bucket)

    def arrived(self, bucket: LiveBucket) -> None:
        """Store this rank's shard of the mean, or add it to earlier passes' shard."""
        if bucket in self.shards:
            self.shards[bucket].add_(self.own(bucket))
        else:
            self.shards[bucket] = self.own(bucket).clone()
            announce(self.parts, "shard_kept", self.shards[bucket])
        self.free(bucket)
        super().arrived(bucket)

    def free(self, bucket: LiveBucket) -> None:
        """Free the bucket's memory now, even if views of it still exist."""
        self.opened.discard(bucket)
        bucket.flat.untyped_storage().resize_(0)

    def settle(self, engine: Engine) -> None:
        """Set every `grad` to None: all means are in the shards."""
        for slot in engine.slots:
            slot.parameter.grad = None
            if slot.parameter not in self.unused:
                self.used.add(slot.parameter)

    # ---- shards of the mean ----------------------------------------------------------

    def mean_of(self, bucket: LiveBucket, slot: Slot, piece: RowPiece) -> Tensor | None:
        """Return this rank's piece of a mean gradient; None if there is no gradient."""
        if slot.parameter not in self.used:
            return None
        return piece.part_of(self.shards[bucket])

    def zero(self, set_to_none: bool) -> None:
        """Free the shards, or set them to zero."""
        self.engine.recover()  # otherwise buckets of a failed pass could arrive later
        if set_to_none:
            self.shards.clear()
            self.used.clear()
        for shard in self.shards.values():
            shard.zero_()
