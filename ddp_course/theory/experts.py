"""Mixtures of experts: parameters, multiplications, and the bytes that ranks send.

A layer has E experts of width f for tokens of d channels, and each token uses k. An
expert has q matrices of d f numbers: 2 in the course's MLP, 3 with a gate (SwiGLU).
With a router of d E numbers, and without biases,

    parameters of the layer               E q d f + d E
    parameters that a token uses          k q d f + d E
    FLOPs of a token, forward             2 (k q d f + d E);  backward twice as many

Memory follows E, computing follows k. R ranks share the experts, and each has T tokens.
A rank sends m rows to other ranks and receives n from them, of d channels and s bytes a
number, so it sends in one layer

               forward                                   backward
    counts     (R - 1)/R E integers
    dispatch   m d s                                     n d s of the outputs' gradients
    combine    n d s                                     m d s of the tokens' gradients

If all choices are uniform, m = n = T k (R - 1)/R. If all tokens of all ranks choose
experts of one rank, that rank receives n = (R - 1) T k, and every other one sends
m = T k: the sum of all bytes hardly grows, but one rank sends and computes R times as
much as the mean, and the others wait.

Sources: Shazeer et al. 2017, arXiv:1701.06538; Lepikhin et al. 2020, arXiv:2006.16668;
Fedus et al. 2021, arXiv:2101.03961. Chapter 17.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

INTEGER = 8  # bytes of a count


@dataclass(frozen=True)
class MixtureCost:
    """The costs of one layer's mixture.

    Attributes:
        parameters: numbers of all experts and the router.
        active: numbers that one token uses.
        flops: multiplications and additions for one token, forward.
    """

    parameters: int
    active: int
    flops: int


def mixture_cost(
    channels: int,
    width: int,
    experts: int,
    experts_per_token: int,
    *,
    matrices: int = 2,
    bias: bool = True,
) -> MixtureCost:
    """Return the costs of a mixture of MLPs.

    Args:
        channels: d, the channels of a token.
        width: f, the channels inside an expert.
        experts: E, the number of experts.
        experts_per_token: k, the experts that each token uses.
        matrices: q, matrices of an expert; 3 for SwiGLU.
        bias: whether an expert's matrices have biases, q - 1 of f numbers and one of d,
            which do not count as FLOPs.

    Chapter 17.
    """
    products = matrices * channels * width
    expert = products + bias * ((matrices - 1) * width + channels)
    router = channels * experts
    return MixtureCost(
        experts * expert + router,
        experts_per_token * expert + router,
        2 * (experts_per_token * products + router),
    )


@dataclass(frozen=True)
class DispatchVolume:
    """The bytes that one rank sends for one layer's mixture, both ways."""

    forward: Fraction
    backward: Fraction

    @property
    def total(self) -> Fraction:
        """All bytes together."""
        return self.forward + self.backward


def dispatch_volume(
    sent: Fraction | int,
    received: Fraction | int,
    channels: int,
    *,
    experts: int,
    ranks: int,
    itemsize: int = 4,
) -> DispatchVolume:
    """Return the bytes that a rank sends to dispatch its tokens and to combine outputs.

    Args:
        sent: m, rows to other ranks; `balanced_rows` if loads are equal.
        received: n, rows from other ranks.
        channels: d, numbers of a row.
        experts: E, whose counts are exchanged first.
        ranks: R.
        itemsize: s, bytes of a number.

    Chapter 17.
    """
    rows = Fraction(sent + received) * channels * itemsize
    counts = Fraction((ranks - 1) * experts * INTEGER, ranks)
    return DispatchVolume(rows + counts, rows)


def balanced_rows(tokens: int, experts_per_token: int, ranks: int) -> Fraction:
    """Return how many rows a rank of T tokens sends away if all choices are uniform.

    That is T k (R - 1)/R; the rank also receives this many. Chapter 17.
    """
    return Fraction(tokens * experts_per_token * (ranks - 1), ranks)


def busiest_rank(loads: Sequence[int], ranks: int) -> Fraction:
    """Return the busiest rank's rows divided by the mean over the ranks.

    `loads` are the rows of each expert; rank r has the r-th part of the experts, in
    order. The experts take that many times as long as with equal loads. Chapter 17.
    """
    each = len(loads) // ranks
    rows = [sum(loads[r * each : (r + 1) * each]) for r in range(ranks)]
    return Fraction(max(rows) * ranks, sum(rows))


def dropped_choices(loads: Sequence[int], limit: int) -> int:
    """Return how many choices exceed the capacity of their experts. Chapter 17."""
    return sum(max(0, load - limit) for load in loads)
