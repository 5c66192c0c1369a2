"""From what the first passes took to an order, the same on all ranks; and back again.

All ranks show their times, the slowest counts, and each makes the same plan of the same
numbers. Chapter 15.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from ddp_course.collectives import communicator
from ddp_course.communication_order.pieces import InPieces
from ddp_course.communication_order.schedule import Played, Policy, Timed, simulate
from ddp_course.measure import Event
from ddp_course.mechanisms.buckets import LiveBucket
from ddp_course.theory import Layer

if TYPE_CHECKING:
    from ddp_course.communication_order.scheduled import ScheduledDataParallel


def plan(
    layers: Sequence[LiveBucket],
    ending: InPieces,
    took: Mapping[tuple[str, int], float],
    policy: Policy,
) -> Played:
    """Return the step that `policy` makes of measured times; a collective call.

    `layers` are in the order of forward; `took` has this rank's seconds by op ("update"
    or "forward") and number of the bucket. A piece of `policy` is in bytes.
    """
    ready, own = ending.ready_after(), []
    for k, layer in enumerate(layers):
        own.append(max(ready[later.index] for later in layers[k:]))
        own += [took["forward", layer.index], took["update", layer.index]]
    shown = communicator(ending.group).exchange((*own, *measure_link(ending)))
    slowest = [Fraction(f"{max(one):.12f}") for one in zip(*shown, strict=True)]
    *told, each, per_byte = slowest
    backward = [before - after for before, after in pairwise((*told[::3], 0))]
    times = zip(layers, backward, told[1::3], told[2::3], strict=True)
    costs = [Layer(f, b, layer.flat.nbytes * per_byte, u) for layer, b, f, u in times]
    piece = policy.piece and policy.piece * per_byte
    return simulate(costs, replace(policy, piece=piece), each=each)


def measure_link(ending: InPieces) -> tuple[float, float]:
    """Return what a piece takes beside its length, and what a byte takes, in seconds.

    Of single numbers and of largest pieces: the shorter of two rows of three, which are
    handed over at once, as in a step.
    """
    largest = max((cut[0] for cut in ending.cut), key=lambda piece: piece.nbytes)

    def seconds(numel: int) -> float:
        tensors = [largest.new_zeros(numel) for _ in range(3)]
        start, how = time.perf_counter(), {"group": ending.sending, "async_op": True}
        for work in [ending.all_reduce(tensor, **how) for tensor in tensors]:
            if work is not None:
                work.wait()
        if largest.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / len(tensors)

    short, long = (min(seconds(n) for _ in range(2)) for n in (1, largest.numel()))
    return short, max(0.0, long - short) / largest.nbytes + 1e-12


def recorded(events: Sequence[Event], model: ScheduledDataParallel) -> Played:
    """Return what an `EventLog` has of backward, step and the next forward, as a step.

    In seconds from the begin of backward; sends are there if the collective is one of
    this course, and last from when it starts to when it has ended. Lay it beside
    `model.planned`. Raises ValueError before there is a plan.
    """
    if model.planned is None:
        raise ValueError("there is no plan yet; it is made in the third forward")
    computed = [e for e in events if e.lane == "compute" and "bucket" in e.detail]
    sends = [e for e in events if e.lane == "communication" and e.nbytes]
    start = min(event.start for event in computed)
    found = [(e, e.op, model.places[e.detail["bucket"]], 0) for e in computed]
    found += [(e, "send", *p) for e, p in zip(sends, model.order, strict=False)]
    timed = [Timed(op, *at, e.start - start, e.end - start) for e, op, *at in found]
    timed.sort(key=lambda event: (event.start, event.end))
    planned = model.planned
    return Played(planned.layers, planned.policy, planned.each, tuple(timed))
