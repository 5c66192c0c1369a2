"""The reducer of stage 2: a bucket has memory only while it is filled and sent.

How many buckets may have memory at once is bounded: a window that moves over them in
the order in which they are launched. With room for two, one bucket is on its way while
the next one fills:

    bucket     0 1 2 3 4      a gradient of bucket 2 comes: bucket 0 is waited for, and
    memory     # #            gives its memory back; what stays is this rank's shard of
                 # #          the mean. One of bucket 4 would stay where autograd has
                   # #        put it, until the window is there.

Explained in chapter 07.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.measure import label
from ddp_course.mechanisms.agreement import on_any_rank
from ddp_course.mechanisms.timeline import span
from ddp_course.zero.reducer import Reducer
from ddp_course.zero.shards import ShardedBucket
from ddp_course.zero.slots import LiveBucket, Slot


class WindowReducer(Reducer):
    """Averages gradients into shards, and lets go of everything else.

    Args:
        group, reduce_scatter: as of `Reducer`.
        limit: how many buckets may have memory at once.
        empty: makes that memory once for all, `limit` times that of the largest bucket;
            None lets every bucket allocate its own and free it again.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        reduce_scatter: Callable[..., Any],
        limit: int,
        empty: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(group, reduce_scatter, empty)
        self.limit = limit
        self.finished = 0  # buckets of this pass that have given their memory back
        self.opened: set[LiveBucket] = set()  # those that have memory
        self.shards: dict[LiveBucket, Tensor] = {}  # this rank's part of the mean
        self.sums: set[LiveBucket] = set()  # shards that are to be added to
        self.came: set[Slot] = set()  # gradients, since they were zeroed
        self.places: dict[Tensor, tuple[LiveBucket, slice]] = {}
        self.means: dict[Tensor, Tensor] = {}  # by parameter: what this rank owns
        self.turns: dict[LiveBucket, int] = {}
        self.pool: list[Tensor] = []
        self.stepped = False  # and the gradients are still there

    def add(self, plan: ShardedBucket, parameters: Mapping[str, Tensor]) -> None:
        """Average the gradients of one more bucket from now on."""
        super().add(plan, parameters)
        for piece in plan.pieces(self.comm.rank):
            where = slice(piece.offset, piece.offset + piece.last - piece.first)
            self.places[parameters[piece.parameter]] = self.buckets[-1], where

    def allocate(self, bucket: LiveBucket) -> None:
        """Lay a bucket out, in memory that is given back until its turn has come."""
        of = bucket.plan.bucket
        flat = torch.empty(bucket.plan.numel, dtype=of.dtype, device=of.device)
        bucket.lie_in(label(flat, "communication buffers"))
        _free(flat)

    def _lay_in_pool(self) -> None:
        """Let buckets take turns in memory that stays: bucket k in place k % limit."""
        rooms, nbytes = len(self.buckets), max(b.plan.nbytes for b in self.buckets)
        rooms = min(rooms, self.limit)
        if len(self.pool) < rooms or self.pool[0].nbytes < nbytes:
            of = {"dtype": torch.uint8, "device": self.buckets[0].flat.device}
            self.pool = [self.empty(nbytes, **of) for _ in range(rooms)]
        for turn, bucket in enumerate(self.buckets):
            room = label(self.pool[turn % rooms], "communication buffers")
            flat = room[: bucket.plan.nbytes].view(bucket.flat.dtype)
            bucket.lie_in(flat)

    # ---- launch --------------------------------------------------------------------

    def begin(self) -> None:
        """The first gradient of a backward pass is there."""
        if self.stepped and self.shards:
            raise RuntimeError(
                "the gradients of the last step are still there: call this optimizer's "
                "zero_grad() before backward; module.zero_grad() cannot reach a shard"
            )
        super().begin()
        for bucket in self.opened.copy():  # by a pass that ended in an error
            self._close(bucket)
        self.finished = 0
        turns = {bucket: turn for turn, bucket in enumerate(self.buckets)}
        if turns != self.turns and self.empty is not None:
            self._lay_in_pool()
        self.turns = turns

    def pack(self, bucket: LiveBucket, slot: Slot, scale: float) -> None:
        """Put this rank's share of a gradient into the bucket, if it has memory."""
        self.came.add(slot)
        if self._open(bucket):
            self._move(slot)

    def without_gradient(self, bucket: LiveBucket, slot: Slot) -> None:
        """A parameter got no gradient in this pass."""
        if slot.parameter.grad is not None:  # but somebody has put one there
            self.pack(bucket, slot, self.scale)
        elif self._open(bucket):
            self._move(slot)

    def _move(self, slot: Slot) -> None:
        """Write a parameter's share, which may be nothing, and let go of its grad."""
        gradient, slot.parameter.grad = slot.parameter.grad, None
        if gradient is None:
            slot.view.zero_()
        else:
            torch.mul(gradient.detach(), self.scale, out=slot.view)

    def _open(self, bucket: LiveBucket) -> bool:
        """Give a bucket its memory if the window is there; tell whether it has it."""
        if bucket in self.opened:
            return True
        turn = self.turns[bucket]
        while turn >= self.finished + self.limit and self.finished < self.next:
            self._wait_for(self.buckets[self.finished])
            self.finished += 1
        if turn >= self.finished + self.limit:
            return False
        if self.empty is None:
            bucket.flat.untyped_storage().resize_(bucket.plan.nbytes)
        self.opened.add(bucket)
        for slot in bucket.slots:
            if slot.here:  # it came before the window
                self._move(slot)
        return True

    def _wait_for(self, bucket: LiveBucket) -> None:
        """Backward has to wait here, since there is no memory for its gradients."""
        if self.timeline is not None:
            self.timeline.computed()
        with span(self.timeline, "wait", bucket=bucket.index):
            self.finish(bucket)
        if self.timeline is not None:
            self.timeline.since = time.perf_counter()

    def launch(self, bucket: LiveBucket, output: Tensor) -> None:
        """Begin the reduce-scatter of a bucket, into its shard or to be added to it."""
        self._open(bucket)  # if all its gradients came before the window
        if bucket in self.shards:
            self.sums.add(bucket)
        else:
            output = label(torch.empty_like(output), "gradients")
            self.shards[bucket] = output
        super().launch(bucket, output)

    # ---- wait ----------------------------------------------------------------------

    def finish(self, bucket: LiveBucket) -> None:
        """Wait for a bucket, if it is under way; only its shard stays."""
        if bucket in self.opened:
            super().finish(bucket)
            if bucket in self.sums:
                self.shards[bucket].add_(bucket.own)
            self._close(bucket)

    def _close(self, bucket: LiveBucket) -> None:
        self.opened.discard(bucket)
        self.sums.discard(bucket)
        if self.empty is None:
            _free(bucket.flat)

    def settle(self) -> None:
        """See which parameters have got a gradient at all, on whichever rank."""
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        used = on_any_rank([slot in self.came for slot in slots], self.group)
        for slot, by_any in zip(slots, used, strict=True):
            if by_any:
                self.came.add(slot)
                if slot.parameter in self.places:
                    bucket, where = self.places[slot.parameter]
                    self.means[slot.parameter] = self.shards[bucket][where]

    def zero(self, set_to_none: bool) -> None:
        """Let go of the shards, or make them zeros."""
        self.stepped = False
        if set_to_none:
            self.shards.clear()
            self.means.clear()
            self.came.clear()
        for shard in self.shards.values():
            shard.zero_()


def _free(flat: Tensor) -> None:
    """Give memory back now, whoever may still hold a view of it."""
    flat.untyped_storage().resize_(0)
