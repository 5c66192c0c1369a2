"""A part that derives an order from measured times, the same on all ranks.

The ranks exchange their times, the slowest counts, and each computes the same plan from
the same numbers. Chapter 15.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch

from ddp_course.collectives import meeting
from ddp_course.communication_order.pieces import InPieces
from ddp_course.communication_order.schedule import (
    GradientPiece,
    Policy,
    TimedStep,
    simulate_step,
)
from ddp_course.measure.blocks import active_logs
from ddp_course.mechanisms.buckets import LiveBucket
from ddp_course.mechanisms.timeline import GpuClock
from ddp_course.theory.ordering import Layer

WARM = 2  # passes before planning; the times of the last one are used


class Planned:
    """A part that times the first passes, then sets the reducer's order by `policy`.

    It also writes the times of layers' forwards and updates into open event logs.
    Forward waits until all layers are updated, before there is a plan; and always if
    the policy's `wait_for_all` is set.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.planned: TimedStep | None = None  # the order that all ranks follow
        self.places: dict[int, int] = {}  # bucket -> its layer in the plan
        self.passes = 0  # backward passes with averaged gradients
        self.clock: GpuClock | None = None
        self.began: Any = None  # start of the last backward
        self.ready: dict[int, Any] = {}  # bucket -> time when it was full
        self.took: Counter[tuple[str, int]] = Counter()  # (op, bucket) -> seconds
        self.called: list[LiveBucket] = []  # buckets in the order of the last forward
        self._doing: tuple[str, LiveBucket, float] | None = None  # op, bucket, start

    def now(self) -> Any:
        """Return the current time; on a GPU, an event recorded on its stream."""
        return self.clock.now() if self.clock else time.perf_counter()

    def before_backward(self, engine: Any) -> None:
        """Begin to time a pass."""
        if torch.cuda.is_initialized() and self.passes < WARM:
            self.clock = GpuClock()
        self.began = self.now()

    def before_launch(self, engine: Any, bucket: LiveBucket) -> None:
        """Record when a bucket is full."""
        self.ready[bucket.index] = self.now()

    def after_backward(self, engine: Any) -> None:
        """Count a backward pass with averaged gradients."""
        self.passes += 1

    def before_forward(self, model: Any) -> None:
        """Plan once enough passes have been timed; until then, wait for all layers."""
        if self.planned is None or self.policy.wait_for_all:
            model.finish()
        if self.passes >= WARM and self.planned is None and torch.is_grad_enabled():
            self.make_plan(model)  # not in an evaluation, which one rank may run alone
        self._doing, self.called = None, []
        self.took.clear()

    def layer_reached(self, model: Any, name: str) -> None:
        """Record the end of the previous layer."""
        self._computed()

    def before_layer(self, model: Any, buckets: Sequence[LiveBucket]) -> None:
        """Time a layer's forward, and remember the order of the layers."""
        self.called += [bucket for bucket in buckets if bucket not in self.called]
        self._doing = "forward", buckets[-1], time.perf_counter()

    def before_update(self, model: Any, bucket: LiveBucket) -> None:
        """Time an update."""
        self._doing = "update", bucket, time.perf_counter()

    def after_update(self, model: Any, bucket: LiveBucket) -> None:
        """Record the end of an update."""
        self._computed()

    def after_forward(self, model: Any, output: Any) -> None:
        """Record the end of the last layer."""
        self._computed()

    def _computed(self) -> None:
        if self._doing is not None:
            (op, bucket, start), self._doing = self._doing, None
            end = time.perf_counter()
            self.took[op, bucket.index] += end - start
            for log in active_logs():
                log.add(op, start, end, lane="compute", bucket=bucket.index)

    def ready_after(self) -> list[float]:
        """Return for each bucket the seconds that backward took until it was full."""
        seconds = self.clock.seconds if self.clock else float
        times = [self.ready[bucket] for bucket in sorted(self.ready)]
        return [seconds(moment) - seconds(self.began) for moment in times]

    def make_plan(self, model: Any) -> None:
        """Compute the order for all later steps; all ranks must call it.

        The layers are in the order in which the first rank called them: other ranks may
        have called them in another order, or left some out.
        """
        unseen = [b for b in model.engine.buckets[::-1] if b not in self.called]
        own = tuple(bucket.index for bucket in unseen + self.called)
        reducer = model.reducer
        first_ranks, *_ = meeting(reducer.group).exchange(own)
        layers = [model.engine.buckets[index] for index in first_ranks]
        ready = self.ready_after()
        self.planned = plan(layers, ready, reducer, self.took, self.policy)
        buckets = [bucket.index for bucket in layers]
        reducer.order = tuple((buckets[k], i) for k, i in self.planned.order)
        self.places = {bucket: k for k, bucket in enumerate(buckets)}

    @property
    def order(self) -> tuple[GradientPiece, ...] | None:
        """The order that all ranks follow, by layers; None without a plan."""
        return self.planned and self.planned.order


def plan(
    layers: Sequence[LiveBucket],
    ready: Sequence[float],
    reducer: InPieces,
    took: Mapping[tuple[str, int], float],
    policy: Policy,
) -> TimedStep:
    """Return the step of `policy` for measured times; all ranks must call it.

    `layers` are in the order of forward. `ready` has, by bucket, the seconds from the
    start of backward until the bucket was full; `took` has this rank's seconds by (op,
    bucket), for the ops "update" and "forward". The `piece` of `policy` is in bytes.
    """
    own = []
    for k, layer in enumerate(layers):
        own.append(max(ready[later.index] for later in layers[k:]))
        own += [took["forward", layer.index], took["update", layer.index]]
    every = meeting(reducer.group).exchange((*own, *measure_link(reducer)))
    slowest = [Fraction(f"{max(one):.12f}") for one in zip(*every, strict=True)]
    *times, each, per_byte = slowest
    backward = [before - after for before, after in pairwise((*times[::3], 0))]
    rows = zip(layers, backward, times[1::3], times[2::3], strict=True)
    costs = [Layer(f, b, layer.flat.nbytes * per_byte, u) for layer, b, f, u in rows]
    piece = policy.piece and policy.piece * per_byte
    return simulate_step(costs, replace(policy, piece=piece), each=each)


def measure_link(reducer: InPieces) -> tuple[float, float]:
    """Return the seconds that any piece takes, and the further seconds of each byte.

    Measures all-reduces of single numbers and of the largest piece, three at a time as
    in a step; the shorter of two measurements counts.
    """
    largest = max((cut[0] for cut in reducer.pieces), key=lambda piece: piece.nbytes)

    def seconds(numel: int) -> float:
        tensors = [largest.new_zeros(numel) for _ in range(3)]
        start, how = time.perf_counter(), {"group": reducer.sending, "async_op": True}
        for work in [reducer.all_reduce(tensor, **how) for tensor in tensors]:
            if work is not None:
                work.wait()
        if largest.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / len(tensors)

    short, long = (min(seconds(n) for _ in range(2)) for n in (1, largest.numel()))
    return short, max(0.0, long - short) / largest.nbytes + 1e-12
