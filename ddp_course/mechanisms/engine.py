"""The engine: gradients go into buckets, which leave while backward still computes.

Autograd tells it of every gradient that is there. This rank's share of it is written
into its place in a bucket, and from then on

    launch    a bucket whose last gradient has come is sent, if it is its turn
    compute   backward goes on with earlier layers meanwhile
    wait      backward has ended: wait for the buckets that are still under way

Every averaged pass sends every bucket once, in one order on all ranks, whatever
gradients come and when: collectives are told apart by nothing but their order, and a
rank that sends less than the others would leave them waiting.

What a bucket's journey leads to is its *ending*: every rank gets the mean of everything
(`AllReduce`: data parallelism), or of its own shard only (`zero`). PyTorch's
counterpart is torch/csrc/distributed/c10d/reducer.cpp; Li et al. 2020, "PyTorch
Distributed", section 3.2. Chapter 05.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ddp_course.mechanisms.agreement import on_any_rank
from ddp_course.mechanisms.buckets import Bucket, LiveBucket, Slot
from ddp_course.mechanisms.hooks import Averager, on_gradient
from ddp_course.mechanisms.timeline import Timeline, span


class AllReduce:
    """The ending of data parallelism: every rank gets the mean of every gradient.

    A gradient is multiplied by 1 / world_size straight into its bucket, and then *is*
    its place in the bucket: there is no second copy.

    `all_reduce(flat, group=group, async_op=True)` returns a handle to wait for, or None
    if it is done; `empty(numel, dtype=..., device=...)` makes the memory of a bucket.
    Other endings override some methods, the moments of a bucket's life.
    """

    unused: frozenset[Tensor] = frozenset()  # no rank has had a gradient of these

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] = dist.all_reduce,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> None:
        self.group, self.all_reduce, self.empty = group, all_reduce, empty
        self.scale = 1 / dist.get_world_size(group)

    def added(self, engine: Engine, bucket: LiveBucket) -> None:
        """The engine has one more bucket: give it memory."""
        of = bucket.plan
        flat = self.empty(of.numel, dtype=of.dtype, device=of.device)
        bucket.lie_in(flat.zero_())

    def pass_begins(self, engine: Engine) -> None:
        """A backward pass that is to be averaged has begun."""

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """A gradient has come: put this rank's share of it into the bucket."""
        torch.mul(slot.parameter.grad.detach(), self.scale, out=slot.view)
        slot.parameter.grad = slot.view

    def without(self, bucket: LiveBucket, slot: Slot) -> None:
        """None has come in this pass; there may be one of earlier passes."""
        if slot.parameter.grad is None:
            slot.view.zero_()
        else:
            self.pack(bucket, slot)

    def launch(self, bucket: LiveBucket) -> Any:
        """Send a bucket that is full; return a handle, which has `wait()`, or None."""
        return self.all_reduce(bucket.flat, group=self.group, async_op=True)

    def arrived(self, bucket: LiveBucket) -> None:
        """A bucket has been waited for."""

    def settle(self, engine: Engine) -> None:
        """All have arrived: what some rank had a gradient for gets the mean.

        The rest has none, so that neither weight decay nor momentum moves it.
        """
        there = [s.fresh or s.parameter.grad is not None for s in engine.slots]
        used = on_any_rank(there, self.group, engine.failed)
        unused = (s for s, by_any in zip(engine.slots, used, strict=True) if not by_any)
        self.unused = frozenset(slot.parameter for slot in unused)
        for slot in engine.slots:
            slot.parameter.grad = None if slot.parameter in self.unused else slot.view

    def keep(self, bucket: LiveBucket, slot: Slot) -> None:
        """A gradient has come in a pass that is not averaged: it only adds up."""


class Engine(Averager):
    """Fills buckets with gradients, and sends them, to what `ending` makes of them.

    Every rank adds the same buckets, and every backward pass that reaches one of their
    parameters is averaged, unless the engine is `held`, or not `expecting` any. Its
    hooks go when its owner goes.
    """

    def __init__(self, ending: AllReduce) -> None:
        self.ending = ending
        self.buckets: list[LiveBucket] = []  # in the order in which they are launched
        self.next = 0  # of these, the one to be launched next
        self.expecting = True  # the next gradient begins a pass that is averaged
        self.timeline = Timeline(())
        self._callback: weakref.ref | None = None  # of the pass that is under way

    def add(self, plan: Bucket, parameters: Mapping[str, Tensor]) -> LiveBucket:
        """Average one more bucket; `parameters` has all names of its plan."""
        where = zip(plan.parameters, plan.offsets, strict=True)
        slots = [Slot(name, parameters[name], offset) for name, offset in where]
        bucket = LiveBucket(len(self.buckets), plan, slots)
        self.buckets.append(bucket)
        self.ending.added(self, bucket)
        for slot in slots:
            on_gradient(slot.parameter, self._gradient_is_there, bucket, slot)
        return bucket

    @property
    def slots(self) -> list[Slot]:
        """The places of all parameters."""
        return [slot for bucket in self.buckets for slot in bucket.slots]

    @property
    def running(self) -> bool:
        """Whether a backward pass that is averaged is under way."""
        # Autograd keeps the callback no longer than the pass, even after an error.
        return self._callback is not None and self._callback() is not None

    def begin(self) -> None:
        """A backward pass has begun; the first gradient says so, if nobody else has."""
        if not self.running and not self.held:
            self.recover()
            callback = functools.partial(self._backward_has_ended)
            self._callback = weakref.ref(callback)
            Variable._execution_engine.queue_callback(callback)
            self._begin(Timeline.begin())

    def _begin(self, timeline: Timeline) -> None:
        self.timeline, self.next = timeline, 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.here = False
        self.ending.pass_begins(self)

    def _gradient_is_there(self, bucket: LiveBucket, slot: Slot) -> None:
        """Autograd has accumulated a gradient: its share goes into the bucket."""
        if slot.parameter.grad is None:
            return  # reached, and left for later: backward in two halves
        slot.fresh = True
        if self.held or not (self.running or self.expecting):
            self.ending.keep(bucket, slot)
            return
        self.begin()
        if slot.here:
            raise RuntimeError(
                f"parameter {slot.name} got its gradient twice in one backward pass, "
                "or from beside the module's outputs. Checkpointing with "
                "use_reentrant=True does so; take use_reentrant=False."
            )
        self._put(self.ending.pack, bucket, slot)
        if not bucket.missing:
            self.timeline.computed(bucket=bucket.index)
            self._launch_full()

    def fill(self, put: Callable, wanted: Callable[[Slot], bool]) -> None:
        """Do the same with all wanted slots that are not here, bucket by bucket."""
        for bucket in self.buckets:
            for slot in bucket.slots if bucket.missing else ():
                if not slot.here and wanted(slot):
                    self._put(put, bucket, slot)
            self._launch_full()

    def _put(self, put: Callable, bucket: LiveBucket, slot: Slot) -> None:
        put(bucket, slot)
        slot.here = True
        bucket.missing -= 1

    def _launch_full(self) -> None:
        """Launch the buckets that are full, as far as it is their turn."""
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.launch(self.buckets[self.next])
            self.next += 1

    def launch(self, bucket: LiveBucket) -> None:
        """Send a bucket, and do not wait for it."""
        bucket.sent = True
        bucket.work = self.timeline.noted(self.ending.launch, bucket)

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        """Send what is left, and wait (on GPUs: the stream does) for all of it."""
        self.timeline.computed()
        self.fill(self.ending.without, lambda slot: True)
        with span(self.timeline, "wait"):
            self.wait()
        self.timeline.all_ended()
        self._callback = None
        try:
            self.ending.settle(self)
        finally:
            for slot in self.slots:
                slot.fresh = False

    def recover(self) -> None:
        """After a pass that ended in an error: other ranks wait for what it has left.

        Raises CollectiveError, on every rank, if it did not end so on all of them.
        """
        if self._callback is not None and not self.running:
            self._callback = None
            self.failed += 1
            for bucket in self.buckets[self.next :]:
                self.launch(bucket)
            self.wait()
            there = [slot.fresh for slot in self.slots]
            on_any_rank(there, self.ending.group, self.failed)
        self.wait()

    def wait(self) -> None:
        """Wait for all buckets that are under way."""
        for bucket in self.buckets:
            self.finish(bucket)

    def finish(self, bucket: LiveBucket) -> None:
        """Wait for one bucket, if it is under way."""
        if bucket.sent:
            work, bucket.work, bucket.sent = bucket.work, None, False
            if work is not None:
                work.wait()
            self.ending.arrived(bucket)

    @torch.no_grad()
    def average(self) -> None:
        """Average the gradients that there are, outside of backward."""
        self.recover()
        for slot in self.slots:
            slot.fresh = slot.parameter.grad is not None
        self._begin(Timeline(()))  # computing is over
        self.fill(self.ending.pack, lambda slot: slot.fresh)
        self._backward_has_ended()
