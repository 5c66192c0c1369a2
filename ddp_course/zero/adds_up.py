"""A part of stage 1: several backward passes add up until `zero_grad`.

After a pass that was averaged, the buckets hold means. Autograd would add the next
pass's gradients to these means, and the sum would be averaged once more. So before the
first gradient comes, this rank's shards of the means are put aside, and the buckets are
zeroed; when the new means have arrived, the shards are added again. Chapter 07.
"""

import weakref

from torch import Tensor

from ddp_course.mechanisms.buckets import LiveBucket, Slot
from ddp_course.mechanisms.engine import Engine
from ddp_course.mechanisms.hooks import while_alive
from ddp_course.mechanisms.parts import announce


class AddsUp:
    """Keeps the mean gradients of earlier passes apart from those of the next one."""

    def __init__(self) -> None:
        self.has_means = False  # the buckets hold means, not this rank's gradients
        self.aside: dict[LiveBucket, Tensor] = {}  # this rank's shards of the means

    def bucket_added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Listen for gradients that autograd is about to accumulate."""
        self.engine = weakref.proxy(engine)
        for slot in bucket.slots:
            while_alive(slot.parameter.register_hook, self.put_aside)

    def pass_begins(self, engine: Engine) -> None:
        """Put means aside, also on a rank that has no gradient at all in this pass."""
        self.put_aside()

    def put_aside(self) -> None:
        """Copy this rank's shards of the means, and zero the buckets."""
        if not self.has_means:
            return
        self.has_means = False
        for bucket in self.engine.buckets:
            zeroed = [s for s in bucket.slots if s.parameter.grad is not s.view]
            if len(zeroed) < len(bucket.slots):
                for slot in zeroed:
                    slot.view.zero_()
                self.aside[bucket] = self.engine.reducer.own(bucket).clone()
                announce(self.engine.parts, "shard_kept", self.aside[bucket])
                bucket.flat.zero_()

    def gradient_kept(self, bucket: LiveBucket, slot: Slot) -> None:
        """Move a gradient that is not averaged yet into its bucket."""
        if slot.parameter.grad is not slot.view:
            slot.parameter.grad = slot.view.copy_(slot.parameter.grad.detach())

    def bucket_arrived(self, bucket: LiveBucket) -> None:
        """Add the earlier mean to the new one."""
        if (before := self.aside.pop(bucket, None)) is not None:
            self.engine.reducer.own(bucket).add_(before)

    def after_backward(self, engine: Engine) -> None:
        """Note that the buckets hold means."""
        self.has_means = True

    def zeroed(self, optimizer: object, set_to_none: bool) -> None:
        """Forget the means of earlier passes."""
        self.aside.clear()
