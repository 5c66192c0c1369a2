"""The engine: gradients go into buckets, which leave while backward still computes.

Autograd calls the engine for every gradient. This rank's share of the gradient is
written into its place in a bucket, and from then on

    launch    a bucket whose last gradient has come is sent, if it is its turn
    compute   backward goes on with earlier layers meanwhile
    wait      backward has ended: wait for the buckets that are still under way

Every averaged pass sends every bucket once, in one order on all ranks, whatever
gradients come and when: collectives are told apart by nothing but their order, and a
rank that sends less than the others would leave them waiting.

A `BucketReducer` decides what a bucket's reduction leads to: every rank gets the mean
of everything (`AllReduceBuckets`: data parallelism), or of its own shard only (`zero`).
Checks, records and recovery are `parts`, to which the engine announces its moments
(`parts.announce`); it knows none of them. PyTorch's counterpart is
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
    """What the engine does with gradients and buckets; subclasses `launch` a bucket.

    A gradient is multiplied by 1 / world_size straight into its bucket, and then *is*
    its place in the bucket: there is no second copy.

    Args:
        group: the ranks that average.
        empty: allocates the memory of a bucket: `empty(numel, dtype=..., device=...)`.
    """

    unused: frozenset[Tensor] = frozenset()  # no rank had a gradient, says a part

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        empty: Callable[..., Tensor] = torch.empty,
    ) -> None:
        self.group, self.empty = group, empty
        self.scale = 1 / dist.get_world_size(group)

    def added(self, engine: Engine, bucket: LiveBucket) -> None:
        """Allocate the memory of a bucket that the engine has just added."""
        plan = bucket.plan
        flat = self.empty(plan.numel, dtype=plan.dtype, device=plan.device)
        bucket.lie_in(flat.zero_())

    def pass_begins(self, engine: Engine) -> None:
        """Get ready: a backward pass that is to be averaged has begun."""

    def pack(self, bucket: LiveBucket, slot: Slot) -> None:
        """Write this rank's share of a new gradient into the bucket."""
        torch.mul(slot.parameter.grad.detach(), self.scale, out=slot.view)
        slot.parameter.grad = slot.view

    def without(self, bucket: LiveBucket, slot: Slot) -> None:
        """Fill the slot of a parameter that got no gradient in this pass.

        Zero counts, or the gradient that earlier passes have left.
        """
        if slot.parameter.grad is None:
            slot.view.zero_()
        else:
            self.pack(bucket, slot)

    def launch(self, bucket: LiveBucket) -> Any:
        """Send a full bucket; return a handle, which has `wait()`, or None if done."""
        raise NotImplementedError

    def arrived(self, bucket: LiveBucket) -> None:
        """Use a bucket whose reduction has ended."""

    def settle(self, engine: Engine) -> None:
        """Give the parameters their means; all buckets have arrived.

        An unused one keeps what it has, mostly None: no weight decay moves it then.
        """
        for slot in engine.slots:
            if slot.parameter not in self.unused:
                slot.parameter.grad = slot.view

    def keep(self, bucket: LiveBucket, slot: Slot) -> None:
        """Take note of a gradient in a pass that is not averaged, and only adds up."""


class AllReduceBuckets(BucketReducer):
    """The reducer of data parallelism: every rank gets the mean of every gradient.

    `all_reduce(flat, group=group, async_op=True)` returns a handle to wait for, or None
    if it is done.
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
        """Begin the all-reduce of a bucket."""
        return self.all_reduce(bucket.flat, group=self.group, async_op=True)


class Engine(Averager):
    """Fills buckets with gradients, and launches them by `reducer`.

    Every rank adds the same buckets, and every backward pass that reaches one of their
    parameters is averaged, unless the engine is `held`, or not `expecting` any. Its
    hooks go when its owner goes. It announces to its parts, in this order:

        backward_broke(engine)          noticed later: the last pass ended in an error
        before_backward(engine)         the first gradient of a pass has come
        bucket_full(engine, bucket)     the bucket's last gradient has come
        before_launch(engine, bucket)
        after_launch(engine, bucket)    `bucket.work` is the handle, or None
        backward_ended(engine)          no gradient will come any more
        before_wait(engine, bucket)     bucket is None: for all that are under way
        after_wait(engine, bucket)
        after_reduction(engine)         all buckets are there; no `grad` has changed yet
        after_backward(engine)          every parameter has its mean
    """

    def __init__(self, reducer: BucketReducer, parts: Iterable[Any] = ()) -> None:
        self.reducer, self.parts = reducer, parts
        self.buckets: list[LiveBucket] = []  # in the order in which they are launched
        self.nodes: list[Any] = []  # of autograd; hooks go with them
        self.next = 0  # the index in `buckets` of the one to be launched next
        self.expecting = True  # the next gradient begins a pass that is averaged
        self._callback: weakref.ref | None = None  # of the pass that is under way

    def add(self, plan: Bucket, parameters: Mapping[str, Tensor]) -> LiveBucket:
        """Add a bucket to average; `parameters` has all names of its plan."""
        where = zip(plan.parameters, plan.offsets, strict=True)
        slots = [Slot(name, parameters[name], offset) for name, offset in where]
        bucket = LiveBucket(len(self.buckets), plan, slots)
        self.buckets.append(bucket)
        self.reducer.added(self, bucket)
        for slot in slots:
            node = on_gradient(slot.parameter, self._gradient_is_there, bucket, slot)
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
        """Begin an averaged pass; the first gradient does so, if nobody has before."""
        if not self.running and not self.held:
            self.recover()
            callback = functools.partial(self._backward_has_ended)
            self._callback = weakref.ref(callback)
            Variable._execution_engine.queue_callback(callback)
            self._begin()
            announce(self.parts, "before_backward", self)

    def _begin(self) -> None:
        self.next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.here = False
        self.reducer.pass_begins(self)

    def _gradient_is_there(self, bucket: LiveBucket, slot: Slot) -> None:
        """Autograd has accumulated a gradient: its share goes into the bucket."""
        if slot.parameter.grad is None:
            return  # reached, and left for later: backward in two halves
        slot.fresh = True
        if self.held or not (self.running or self.expecting):
            self.reducer.keep(bucket, slot)
            return
        self.begin()
        if slot.here:
            raise RuntimeError(
                f"parameter {slot.name} got its gradient twice in one backward pass, "
                "or from beside the module's outputs. Checkpointing with "
                "use_reentrant=True does so; take use_reentrant=False."
            )
        self._put(self.reducer.pack, bucket, slot)
        if not bucket.missing:
            announce(self.parts, "bucket_full", self, bucket)
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
        announce(self.parts, "before_launch", self, bucket)
        bucket.sent, bucket.work = True, self.reducer.launch(bucket)
        announce(self.parts, "after_launch", self, bucket)

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        """Send the remaining buckets, and wait (on GPUs: the stream does) for all."""
        announce(self.parts, "backward_ended", self)
        self.fill(self.reducer.without, lambda slot: True)
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
        """Tell parts of a pass that broke off in an error; wait for what was sent."""
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
        """Average the gradients that there are, outside of backward."""
        self.recover()
        for slot in self.slots:
            slot.fresh = slot.parameter.grad is not None
        self._begin()
        self.fill(self.reducer.pack, lambda slot: slot.fresh)
        self._backward_has_ended()
