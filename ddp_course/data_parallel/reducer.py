"""The reducer: averages gradients over the ranks while backward still computes them.

Autograd tells it of each gradient that is there (`hooks`). The reducer multiplies it by
1 / world_size straight into its bucket, in one pass over the memory, and from then on
the parameter's `grad` is a view of the bucket: no second copy exists. Then

    launch    a bucket whose last gradient has come is handed to the all-reduce
    compute   backward goes on with earlier layers meanwhile
    wait      backward has ended: wait for the buckets that are still under way

Buckets are launched in the order of the plan on all ranks, whatever the order in which
gradients come: collectives are told apart by nothing but their order. Every backward
pass sends every bucket once, even if some gradients did not come: a rank that sends
less than the others would leave them waiting for ever.

PyTorch's counterpart is in C++, torch/csrc/distributed/c10d/reducer.cpp; Li et al.
2020, "PyTorch Distributed", section 3.2. Chapter 05.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from ddp_course.data_parallel.slots import LiveBucket, Slot, allocate
from ddp_course.data_parallel.unused import Unused
from ddp_course.mechanisms.buckets import Bucket
from ddp_course.mechanisms.hooks import on_gradient
from ddp_course.mechanisms.timeline import Timeline, span


class Reducer:
    """Averages the gradients of `parameters` (by name), bucket by bucket.

    Args:
        parameters: name -> parameter; all names of the plan.
        plan: the buckets, in the order in which they are sent.
        group: the ranks that average.
        all_reduce: called as `all_reduce(flat, group=group, async_op=True)`; returns a
            handle to wait for, or None if it is done.
        empty: makes the memory of a bucket: `empty(numel, dtype=..., device=...)`.
        unused: what to do about parameters without a gradient.
        as_view: make gradients views of the buckets.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        plan: Sequence[Bucket],
        group: dist.ProcessGroup | None,
        all_reduce: Callable[..., Any],
        empty: Callable[..., Tensor],
        unused: Unused,
        as_view: bool = True,
    ) -> None:
        self.group, self.all_reduce, self.as_view = group, all_reduce, as_view
        self.unused = unused
        self.scale = 1 / dist.get_world_size(group)
        self.buckets = [
            allocate(bucket, parameters, empty, unused.find) for bucket in plan
        ]
        self.slots = [slot for bucket in self.buckets for slot in bucket.slots]
        self.expecting = False  # the next backward pass is to be averaged
        self.running = False  # such a pass is under way
        self.next = 0  # the bucket to be launched next
        self.timeline: Timeline | None = None
        for bucket in self.buckets:
            for slot in bucket.slots:
                on_gradient(slot.parameter, self._gradient_is_there, bucket, slot)

    def forward_begins(self, averaged: bool) -> None:
        """Look whether the last backward passes left the gradients as they should."""
        if self.running:  # it ended in an error; what was launched must still arrive
            self.wait()
            self.running = False
            self._forget()
        if averaged:
            self.unused.forward_begins()

    def forward_ended(self, output: Any, averaged: bool) -> None:
        """Note whether the next backward pass is to be averaged."""
        self.expecting = averaged
        self.unused.forward_ended(output)

    # ---- launch --------------------------------------------------------------------

    def begin(self) -> None:
        """A backward pass that is to be averaged has reached the module's output."""
        if self.running:
            return
        self.running, self.expecting, self.next = True, False, 0
        Variable._execution_engine.queue_callback(self._backward_has_ended)
        self.timeline = Timeline.begin()
        for bucket in self.buckets:
            bucket.missing, bucket.work = len(bucket.slots), None
            for slot in bucket.slots:
                slot.here = False
                if self.unused.out_of_reach(slot):
                    self._without_gradient(bucket, slot)
        self._launch_full()

    def _gradient_is_there(self, bucket: LiveBucket, slot: Slot) -> None:
        """Autograd has accumulated a gradient: its share goes into the bucket."""
        slot.fresh = True
        if not self.running:
            if not self.expecting:
                return  # no_sync: it only accumulates
            self.begin()
        if slot.here:
            raise RuntimeError(
                f"{slot.name} got its gradient twice in one backward pass, or from "
                "beside the module's outputs. Checkpointing with use_reentrant=True "
                "does so; take use_reentrant=False."
            )
        self._pack(slot)
        slot.here = True
        bucket.missing -= 1
        if not bucket.missing:
            if self.timeline is not None:
                self.timeline.computed(bucket=bucket.plan.index)
            self._launch_full()

    def _pack(self, slot: Slot) -> None:
        """Put this rank's share of a gradient, grad / world_size, into the bucket."""
        gradient = slot.parameter.grad
        if gradient.requires_grad:  # backward(create_graph=True)
            gradient = gradient.detach()
        torch.mul(gradient, self.scale, out=slot.view)
        if self.as_view:
            slot.parameter.grad = slot.view

    def _without_gradient(self, bucket: LiveBucket, slot: Slot) -> None:
        """A parameter got no gradient in this pass."""
        if slot.fresh and slot.parameter.grad is not None:  # but one in no_sync
            self._pack(slot)
        else:
            slot.fresh = False
            self.unused.fill(slot, self.scale)
        slot.here = True
        bucket.missing -= 1

    def _launch_full(self) -> None:
        """Launch the buckets that are full, as far as it is their turn."""
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self._launch(self.buckets[self.next])
            self.next += 1

    def _launch(self, bucket: LiveBucket) -> None:
        if self.unused.find:
            bucket.flags.copy_(torch.tensor([slot.fresh for slot in bucket.slots]))
        timeline, index = self.timeline, bucket.plan.index
        start = time.perf_counter()
        with span(timeline, "launch", bucket=index):
            bucket.work = self.all_reduce(bucket.flat, group=self.group, async_op=True)
        if timeline is not None:
            timeline.sent(bucket.work, bucket.flat.nbytes, start, bucket=index)
            timeline.since = time.perf_counter()  # launching is no computing

    # ---- wait ----------------------------------------------------------------------

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        """Send what is left, and wait for what is under way: then gradients are means.

        On GPUs "wait" means that the stream of the optimizer waits, not the host.
        """
        if self.timeline is not None:
            self.timeline.computed()
        for bucket in self.buckets:
            for slot in bucket.slots if bucket.missing else ():
                if not slot.here:
                    self._without_gradient(bucket, slot)
        self._launch_full()
        with span(self.timeline, "wait"):
            self.wait()
        if self.timeline is not None:
            self.timeline.all_ended()
        self.running = False
        try:
            self.unused.settle(self.buckets, self.as_view)
            for slot in () if self.as_view else self.slots:
                if slot.fresh:
                    slot.copy_back()
        finally:
            self._forget()

    def wait(self) -> None:
        """Wait for all buckets that were launched."""
        for bucket in self.buckets[: self.next]:
            work, bucket.work = bucket.work, None
            if work is not None:
                work.wait()

    def _forget(self) -> None:
        for slot in self.slots:
            slot.fresh = False

    @torch.no_grad()
    def shadow(self) -> None:
        """Take part in the others' averaging with nothing but zeros (`join`)."""
        for bucket in self.buckets:
            for slot in bucket.slots:
                if slot.parameter.grad is slot.view:  # stays as it is
                    slot.parameter.grad = slot.view.clone()
            bucket.flat.zero_()
            bucket.work = self.all_reduce(bucket.flat, group=self.group, async_op=True)
        self.next = len(self.buckets)
        self.wait()
        self.unused.joined(self.buckets)
