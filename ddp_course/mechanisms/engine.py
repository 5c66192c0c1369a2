"""The engine: collect gradients in buckets, and send these while backward computes.

Autograd calls the engine for every gradient. The engine writes this rank's share of the
mean gradient into its place in a bucket, and then

    launch    sends a bucket when its last gradient has come and earlier ones are sent
    compute   lets backward continue with earlier layers
    wait      when backward has ended, waits for the buckets that are still under way

Every averaged pass sends every bucket once, in the same order on all ranks, whichever
gradients come and when: collectives match by nothing but their order, and if a rank
sent fewer buckets than the others, they would wait forever.

A `BucketReducer` decides how a bucket is reduced: every rank gets the mean of
everything (`AllReduceBuckets`: data parallelism), or of its own shard only (`zero`).
Checks, records and recovery are `parts`, to which the engine announces its moments
(`parts.announce`); it imports none of them. PyTorch's counterpart is
torch/csrc/distributed/c10d/reducer.cpp; Li et al. 2020, "PyTorch Distributed", section
3.2. Chapter 05.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ddp_course.mechanisms.buckets import Bucket, LiveBucket, Slot
from ddp_course.mechanisms.hooks import Averager, on_gradient
from ddp_course.mechanisms.parts import announce


class BucketReducer:
    """The base class of an engine's reducers; subclasses `launch` a bucket.

    A gradient is multiplied by 1 / world_size straight into its bucket. Then `grad` is
    a view of the bucket: there is no second copy.

    Args:
        group: the ranks that average; None: all ranks.
        empty: allocates the memory of a bucket: `empty(numel, dtype=..., device=...)`.
    """

    unused: frozenset[Tensor] = frozenset()  # no rank has their gradients

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> None:
        self.group, self.empty = group, empty
        self.scale = 1 / dist.get_world_size(group)

    def set_up(self, engine: Engine, bucket: LiveBucket) -> None:
        """Allocate the memory of a bucket that the engine has just added."""
        plan = bucket.plan
        flat = self.empty(plan.numel, dtype=plan.dtype, device=plan.device)
        bucket.use_memory(flat.zero_())

    def pass_begins(self, engine: Engine) -> None:
        """Prepare for a backward pass that is to be averaged."""

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """Write this rank's share of the mean gradient into the bucket."""
        torch.mul(slot.parameter.grad.detach(), self.scale, out=slot.view)
        slot.parameter.grad = slot.view

    def pack_missing(self, bucket: LiveBucket, slot: Slot) -> None:
        """Fill the slot of a parameter that got no gradient in this pass.

        The slot gets the gradient of earlier passes if there is one, otherwise zeros.
        """
        if slot.parameter.grad is None:
            slot.view.zero_()
        else:
            self.pack(bucket, slot)

    def launch(self, bucket: LiveBucket) -> Any:
        """Send a full bucket; return a handle to wait for, or None if it has ended."""
        raise NotImplementedError

    def arrived(self, bucket: LiveBucket) -> None:
        """Use a bucket whose reduction has ended."""

    def settle(self, engine: Engine) -> None:
        """Set `grad` of every parameter to its mean, once all buckets have arrived.

        An unused parameter keeps its `grad`, usually None, so no weight decay changes
        it.
        """
        for slot in engine.slots:
            if slot.parameter not in self.unused:
                slot.parameter.grad = slot.view

    def keep(self, bucket: LiveBucket, slot: Slot) -> None:
        """Record a gradient of a pass that only accumulates, and is not averaged."""


class AllReduceBuckets(BucketReducer):
    """The reducer of data parallelism: every rank gets the mean of every gradient.

    `all_reduce(flat, group=group, async_op=True)` returns a handle to wait for, or None
    if the all-reduce has ended.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] = dist.all_reduce,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> None:
        super().__init__(group, empty)
        self.all_reduce = all_reduce

    def launch(self, bucket: LiveBucket) -> Any:
        """Start the all-reduce of a bucket."""
        group = bucket.plan.group or self.group
        return self.all_reduce(bucket.flat, group=group, async_op=True)


class Engine(Averager):
    """The object that fills buckets with gradients and lets `reducer` launch them.

    Every rank adds the same buckets. Every backward pass that reaches one of their
    parameters is averaged, unless averaging is deferred (`defer`) or the engine is not
    `expecting` a pass. When the engine is deleted, its hooks are removed. It announces
    to its parts, in this order:

        backward_broke(engine)          a new pass begins, and the last one has failed
        before_backward(engine)         the first gradient of a pass has come
        bucket_full(engine, bucket)     the bucket's last gradient has come
        before_launch(engine, bucket)
        after_launch(engine, bucket)    `bucket.work` is the handle, or None
        backward_ended(engine)          no further gradient will come
        before_wait(engine, bucket)     bucket is None: all buckets under way
        after_wait(engine, bucket)
        after_reduction(engine)         all buckets are reduced; no `grad` is set yet
        after_backward(engine)          every parameter has its mean
    """

    def __init__(self, reducer: BucketReducer, parts: Iterable[Any] = ()) -> None:
        self.reducer, self.parts = reducer, parts
        self.buckets: list[LiveBucket] = []  # in the order in which they are launched
        self.nodes: list[Any] = []  # autograd's nodes, which own the engine's hooks
        self.next = 0  # the index in `buckets` of the next bucket to launch
        self.expecting = True  # the next gradient begins a pass that is averaged
        self._callback: weakref.ref | None = None  # the end of the running pass

    def add(self, plan: Bucket, parameters: Mapping[str, Tensor]) -> LiveBucket:
        """Add a bucket to average; `parameters` has all names of its plan."""
        where = zip(plan.parameters, plan.offsets, strict=True)
        slots = [Slot(name, parameters[name], offset) for name, offset in where]
        bucket = LiveBucket(len(self.buckets), plan, slots)
        self.buckets.append(bucket)
        self.reducer.set_up(self, bucket)
        for slot in slots:
            node = on_gradient(slot.parameter, self._gradient_accumulated, bucket, slot)
            self.nodes.append(node)
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
        """Begin an averaged pass, unless one runs; each gradient calls this."""
        if not self.running and not self.deferrals:
            self.recover()
            callback = functools.partial(self._end_backward)
            self._callback = weakref.ref(callback)
            Variable._execution_engine.queue_callback(callback)
            self._begin()
            announce(self.parts, "before_backward", self)

    def _begin(self) -> None:
        self.next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.filled = False
        self.reducer.pass_begins(self)

    def _gradient_accumulated(self, bucket: LiveBucket, slot: Slot) -> None:
        """Write this rank's share of the mean gradient into its bucket."""
        if slot.parameter.grad is None:
            return  # a backward in two halves computes it later
        slot.fresh = True
        if self.deferrals or not (self.running or self.expecting):
            self.reducer.keep(bucket, slot)
            return
        self.begin()
        if slot.filled:
            raise RuntimeError(
                f"parameter {slot.name} got its gradient twice in one backward pass, "
                "or not through the module's outputs. Checkpointing with "
                "use_reentrant=True does so; use use_reentrant=False."
            )
        self._put(self.reducer.pack, bucket, slot)
        if not bucket.missing:
            announce(self.parts, "bucket_full", self, bucket)
            self._launch_full()

    def fill(self, put: Callable, wanted: Callable[[Slot], bool]) -> None:
        """Fill all wanted slots that are not filled yet, bucket by bucket."""
        for bucket in self.buckets:
            for slot in bucket.slots if bucket.missing else ():
                if not slot.filled and wanted(slot):
                    self._put(put, bucket, slot)
            self._launch_full()

    def _put(self, put: Callable, bucket: LiveBucket, slot: Slot) -> None:
        put(bucket, slot)
        slot.filled = True
        bucket.missing -= 1

    def _launch_full(self) -> None:
        """Launch full buckets in order, up to the first that is not full."""
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.launch(self.buckets[self.next])
            self.next += 1

    def launch(self, bucket: LiveBucket) -> None:
        """Send a bucket, and do not wait for it."""
        announce(self.parts, "before_launch", self, bucket)
        bucket.sent, bucket.work = True, self.reducer.launch(bucket)
        announce(self.parts, "after_launch", self, bucket)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Send the remaining buckets, and wait (on GPUs: the stream does) for all."""
        announce(self.parts, "backward_ended", self)
        self.fill(self.reducer.pack_missing, lambda slot: True)
        announce(self.parts, "before_wait", self, None)
        self.wait()
        announce(self.parts, "after_wait", self, None)
        self._callback = None
        try:
            announce(self.parts, "after_reduction", self)
            self.reducer.settle(self)
            announce(self.parts, "after_backward", self)
        finally:
            for slot in self.slots:
                slot.fresh = False

    def recover(self) -> None:
        """Announce a pass that ended in an error; wait for the buckets that it sent."""
        if self._callback is not None and not self.running:
            self._callback = None
            announce(self.parts, "backward_broke", self)
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
            self.reducer.arrived(bucket)

    @torch.no_grad()
    def average(self) -> None:
        """Average all gradients that are not None, outside of backward."""
        self.recover()
        for slot in self.slots:
            slot.fresh = slot.parameter.grad is not None
        self._begin()
        self.fill(self.reducer.pack, lambda slot: slot.fresh)
        self._end_backward()
