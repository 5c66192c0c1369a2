"""The reducer: every rank gets its part of the mean gradients, while backward runs.

An optimizer that steps 1/N of the elements needs the mean gradients of these elements
only. So each bucket is reduce-scattered: half of an all-reduce, which would go on to
give everybody everything. The rest is as in data parallelism (chapter 05): autograd
tells of each gradient that is there; its share, gradient / N, is written into the
bucket in one pass over the memory; and then

    launch    a bucket whose last gradient has come is handed to the reduce-scatter
    compute   backward goes on with earlier layers meanwhile
    wait      backward has ended: wait for the buckets that are still under way

Afterwards a bucket holds the mean in this rank's shard, and something useless in the
others: what this rank has added to their sums. Every `grad` is a view of its bucket.

Buckets are launched in one order on all ranks. It is the plan's in the first pass; then
that in which rank 0 has seen them become full: a model whose parameters come in groups,
all matrices first and all biases last, fills its buckets in an order that no plan can
know. PyTorch's DDP arranges its buckets anew for the same reason.

Rajbhandari et al. 2020, "ZeRO", sections 5.1 and 7.2.1. Chapter 07.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ddp_course.collectives import communicator
from ddp_course.measure import label
from ddp_course.mechanisms.agreement import on_any_rank
from ddp_course.mechanisms.hooks import on_gradient
from ddp_course.mechanisms.timeline import Timeline, span
from ddp_course.zero.alone import check_alone, check_alone_later
from ddp_course.zero.shards import ShardedBucket
from ddp_course.zero.slots import LiveBucket, Slot, before_gradient


class Reducer:
    """Averages the gradients of some parameters into shards, bucket by bucket.

    Args:
        group: the ranks that average.
        reduce_scatter: called as `reduce_scatter(own, flat, group=group,
            async_op=True)`, where `own` is this rank's part of `flat`; returns a handle
            to wait for, or None if it is done.
        empty: makes the memory of a bucket: `empty(numel, dtype=..., device=...)`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        reduce_scatter: Callable[..., Any],
        empty: Callable[..., Tensor],
    ) -> None:
        self.group, self.reduce_scatter, self.empty = group, reduce_scatter, empty
        self.comm = communicator(group)
        self.scale = 1 / self.comm.size
        self.buckets: list[LiveBucket] = []  # in the order in which they are launched
        self.sync = True  # backward passes are averaged
        self.next = 0  # the bucket to be launched next
        self.full: list[int] = []  # the buckets' numbers, as they became full
        self.in_order = False  # the order is rank 0's
        self.timeline: Timeline | None = None
        self._callback: weakref.ref | None = None  # of the pass that is under way

    def add(self, plan: ShardedBucket, parameters: Mapping[str, Tensor]) -> None:
        """Average the gradients of one more bucket from now on."""
        bucket = LiveBucket.of(len(self.buckets), plan, self.comm.rank, parameters)
        self.allocate(bucket)
        self.buckets.append(bucket)
        self.in_order = False
        for slot in bucket.slots:
            on_gradient(slot.parameter, self._gradient_is_there, bucket, slot)
            before_gradient(slot.parameter, self.gradient_is_coming, slot)

    def allocate(self, bucket: LiveBucket) -> None:
        """Make the memory of a bucket: that of all its gradients, all the time."""
        plan, of = bucket.plan, bucket.plan.bucket
        flat = self.empty(plan.numel, dtype=of.dtype, device=of.device)
        bucket.lie_in(label(flat.zero_(), "gradients"))

    @property
    def running(self) -> bool:
        """Whether a backward pass that is averaged is under way.

        Autograd keeps the callback for the end of a pass no longer than the pass, even
        if that ends in an error.
        """
        return self._callback is not None and self._callback() is not None

    # ---- launch --------------------------------------------------------------------

    def begin(self) -> None:
        """The first gradient of a backward pass is there."""
        if not self.in_order:
            check_alone(slot for bucket in self.buckets for slot in bucket.slots)
        self.wait()  # for what a pass has left that ended in an error
        callback = functools.partial(self._backward_has_ended)
        self._callback = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)
        self.timeline, self.next, self.full = Timeline.begin(), 0, []
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.here = False

    def gradient_is_coming(self, slot: Slot) -> None:
        """Autograd is about to add to a gradient: prepare what it adds to.

        After an averaged pass that is a mean, in this rank's shard. As it will be
        multiplied by 1 / N once more, it must be N times as much; what lies in other
        shards has had its effect.
        """
        if slot.reduced:
            slot.reduced = False
            if slot.parameter.grad is slot.view:
                slot.own.mul_(self.comm.size)
                for part in slot.others:
                    part.zero_()

    def _gradient_is_there(self, bucket: LiveBucket, slot: Slot) -> None:
        """Autograd has accumulated a gradient: its share goes into the bucket."""
        gradient = slot.parameter.grad
        if gradient.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of parameter {slot.name} is {gradient.layout}; only "
                "dense gradients can be cut into shards (Embedding: sparse=False)"
            )
        if not self.sync:
            if gradient is not slot.view:
                self.pack(bucket, slot, 1.0)
            return
        if not self.running:
            self.begin()
        if slot.here:
            raise RuntimeError(
                f"parameter {slot.name} got its gradient twice in one backward pass. "
                "Checkpointing with use_reentrant=True does so; take "
                "use_reentrant=False."
            )
        self.pack(bucket, slot, self.scale)
        self._is_here(bucket, slot)
        if not bucket.missing:
            self.full.append(bucket.index)
            if self.timeline is not None:
                self.timeline.computed(bucket=bucket.index)
            self._launch_full()

    def pack(self, bucket: LiveBucket, slot: Slot, scale: float) -> None:
        """Put a gradient, or this rank's share of it, into the bucket."""
        torch.mul(slot.parameter.grad.detach(), scale, out=slot.view)
        slot.parameter.grad = slot.view

    def without_gradient(self, bucket: LiveBucket, slot: Slot) -> None:
        """A parameter got no gradient in this pass: it has those of earlier ones."""
        if slot.parameter.grad is None:
            slot.view.zero_()
        elif slot.reduced and slot.parameter.grad is slot.view:
            for part in slot.others:  # its mean stays as it is
                part.zero_()
        else:
            self.pack(bucket, slot, self.scale)

    def _is_here(self, bucket: LiveBucket, slot: Slot) -> None:
        slot.here = True
        bucket.missing -= 1

    def _launch_full(self) -> None:
        """Launch the buckets that are full, as far as it is their turn."""
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.launch(self.buckets[self.next], self.buckets[self.next].own)
            self.next += 1

    def launch(self, bucket: LiveBucket, output: Tensor) -> None:
        """Begin the reduce-scatter of a bucket, into `output`."""
        timeline, start = self.timeline, time.perf_counter()
        with span(timeline, "launch", bucket=bucket.index):
            bucket.work = self.reduce_scatter(
                output, bucket.flat, group=self.group, async_op=True
            )
        if timeline is not None:
            timeline.sent(bucket.work, bucket.plan.nbytes, start, bucket=bucket.index)
            timeline.since = time.perf_counter()  # launching is no computing

    # ---- wait ----------------------------------------------------------------------

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        """Send what is left, and wait for what is under way: then shards are means."""
        if self.timeline is not None:
            self.timeline.computed()
        for bucket in self.buckets:
            for slot in bucket.slots if bucket.missing else ():
                if not slot.here:
                    self.without_gradient(bucket, slot)
                    self._is_here(bucket, slot)
        self._launch_full()
        with span(self.timeline, "wait"):
            self.wait()
        if self.timeline is not None:
            self.timeline.all_ended()
        self._callback = None
        self.settle()
        if not self.in_order:
            self._take_the_order_of_rank_0()
            check_alone_later(self.buckets)

    def wait(self) -> None:
        """Wait for all buckets that were launched."""
        for bucket in self.buckets[: self.next]:
            self.finish(bucket)

    def finish(self, bucket: LiveBucket) -> None:
        """Wait for a bucket, if it is under way."""
        work, bucket.work = bucket.work, None
        if work is not None:
            work.wait()

    def settle(self) -> None:
        """All buckets have arrived: see which parameters have got a gradient at all.

        One that has none on any rank keeps none: neither weight decay nor momentum may
        move it, as in one process.
        """
        slots = [slot for bucket in self.buckets for slot in bucket.slots]
        used = on_any_rank([s.parameter.grad is not None for s in slots], self.group)
        for slot, by_any in zip(slots, used, strict=True):
            if by_any:
                slot.parameter.grad = slot.view
                slot.reduced = True

    def _take_the_order_of_rank_0(self) -> None:
        """From the next pass on, launch buckets in the order in which they get full."""
        seen = self.comm.exchange(tuple(self.full))[0]
        turns = {index: turn for turn, index in enumerate(seen)}
        self.buckets.sort(key=lambda bucket: turns.get(bucket.index, len(turns)))
        self.in_order = True
