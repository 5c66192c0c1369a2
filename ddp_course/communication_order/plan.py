"""A part: from what the first passes took to an order, the same on all ranks.

All ranks show their times, the slowest counts, and each makes the same plan of the same
numbers. Chapter 15.
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
from ddp_course.communication_order.schedule import Piece, Played, Policy, simulate
from ddp_course.measure.blocks import active_logs
from ddp_course.mechanisms.buckets import LiveBucket
from ddp_course.mechanisms.timeline import GpuClock
from ddp_course.theory.ordering import Layer

WARM = 2  # averaged passes, the last of which is the one whose times count


class Planned:
    """Times the first passes; then gives the reducer the order that `policy` makes.

    What a layer's forward and update take is written into open event logs, too. Until
    there is a plan, and with a policy that waits for all, forward waits for everything.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.played: Played | None = None  # the plan
        self.places: dict[int, int] = {}  # bucket -> its layer in the plan
        self.passes = 0  # that were averaged
        self.clock: GpuClock | None = None
        self.began: Any = None  # when the last backward began
        self.ready: dict[int, Any] = {}  # bucket -> when it was full in that pass
        self.took: Counter[tuple[str, int]] = Counter()  # (op, bucket) -> seconds
        self.called: list[LiveBucket] = []  # by the last forward, in its order
        self._doing: tuple[str, LiveBucket, float] | None = None  # since when

    def now(self) -> Any:
        """Return the current time; on a GPU, an event recorded on its stream."""
        return self.clock.now() if self.clock else time.perf_counter()

    def before_backward(self, engine: Any) -> None:
        """Begin to time a pass."""
        if torch.cuda.is_initialized() and self.passes < WARM:
            self.clock = GpuClock()
        self.began = self.now()

    def before_launch(self, engine: Any, bucket: LiveBucket) -> None:
        """Note when a bucket is full."""
        self.ready[bucket.index] = self.now()

    def after_backward(self, engine: Any) -> None:
        """Count an averaged pass."""
        self.passes += 1

    def before_forward(self, model: Any) -> None:
        """Make the plan when there are times; wait for everything before."""
        if self.played is None or self.policy.wait_for_all:
            model.finish()
        if self.passes >= WARM and self.played is None and torch.is_grad_enabled():
            self.make(model)  # not before an evaluation: one rank may do it alone
        self._doing, self.called = None, []
        self.took.clear()

    def layer_reached(self, model: Any, name: str) -> None:
        """End the layer before."""
        self._computed()

    def before_layer(self, model: Any, buckets: Sequence[LiveBucket]) -> None:
        """Time a layer's forward, and remember the order of the layers."""
        self.called += [bucket for bucket in buckets if bucket not in self.called]
        self._doing = "forward", buckets[-1], time.perf_counter()

    def before_update(self, model: Any, bucket: LiveBucket) -> None:
        """Time an update."""
        self._doing = "update", bucket, time.perf_counter()

    def after_update(self, model: Any, bucket: LiveBucket) -> None:
        """End an update."""
        self._computed()

    def after_forward(self, model: Any, output: Any) -> None:
        """End the last layer."""
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

    def make(self, model: Any) -> None:
        """Make the order that is kept from now on; a collective call.

        It is an order of the layers as the first rank has called them: other ranks may
        have called them in another order, or left some out.
        """
        unseen = [b for b in model.engine.buckets[::-1] if b not in self.called]
        own = tuple(bucket.index for bucket in unseen + self.called)
        reducer = model.reducer
        first_ranks, *_ = meeting(reducer.group).exchange(own)
        layers = [model.engine.buckets[index] for index in first_ranks]
        ready = self.ready_after()
        self.played = plan(layers, ready, reducer, self.took, self.policy)
        buckets = [bucket.index for bucket in layers]
        reducer.order = tuple((buckets[k], i) for k, i in self.played.order)
        self.places = {bucket: k for k, bucket in enumerate(buckets)}

    @property
    def order(self) -> tuple[Piece, ...] | None:
        """The order that all ranks keep, by layers; None without a plan."""
        return self.played and self.played.order


def plan(
    layers: Sequence[LiveBucket],
    ready: Sequence[float],
    reducer: InPieces,
    took: Mapping[tuple[str, int], float],
    policy: Policy,
) -> Played:
    """Return the step that `policy` makes of measured times; a collective call.

    `layers` are in the order of forward; `ready` has seconds by the number of the
    bucket, `took` those of an op ("update" or "forward") on this rank. A piece of
    `policy` is in bytes.
    """
    own = []
    for k, layer in enumerate(layers):
        own.append(max(ready[later.index] for later in layers[k:]))
        own += [took["forward", layer.index], took["update", layer.index]]
    shown = meeting(reducer.group).exchange((*own, *measure_link(reducer)))
    slowest = [Fraction(f"{max(one):.12f}") for one in zip(*shown, strict=True)]
    *times, each, per_byte = slowest
    backward = [before - after for before, after in pairwise((*times[::3], 0))]
    rows = zip(layers, backward, times[1::3], times[2::3], strict=True)
    costs = [Layer(f, b, layer.flat.nbytes * per_byte, u) for layer, b, f, u in rows]
    piece = policy.piece and policy.piece * per_byte
    return simulate(costs, replace(policy, piece=piece), each=each)


def measure_link(reducer: InPieces) -> tuple[float, float]:
    """Return the seconds of a piece beside its length, and those of a byte.

    Of single numbers and of largest pieces: the shorter of two rows of three, which are
    handed over at once, as in a step.
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
