"""From what the first passes took to an order, the same on all ranks.

All ranks show their times, the slowest counts, and each makes the same plan of the same
numbers. Chapter 15.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import torch

from ddp_course.collectives import communicator
from ddp_course.communication_order.pieces import InPieces
from ddp_course.communication_order.schedule import Played, Policy, simulate
from ddp_course.mechanisms.buckets import LiveBucket
from ddp_course.theory import Layer


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
