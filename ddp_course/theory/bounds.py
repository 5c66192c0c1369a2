"""How good can a collective be, how good is a measured one, and which is better when.

The conventions (n, S, alpha, beta, one message in and one out at a time) are those of
`costs`. Explained in chapters 02 and 03.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from ddp_course.launch import Link
from ddp_course.theory.all_reduce import all_reduce_double_tree, all_reduce_ring
from ddp_course.theory.checks import (
    check_not_negative,
    check_positive,
    check_world,
    log2_up,
)
from ddp_course.theory.costs import Cost

TWICE = ("all_reduce",)
ONCE = ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")
WHOLE = ("broadcast", "reduce")


def bus_factor(collective: str, world_size: int) -> Fraction:
    """Return busbw / algbw, which makes numbers comparable across world sizes.

    2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter, all_to_all, scatter
    and gather, 1 for broadcast and reduce (even for n = 1). Raises ValueError for
    another name. Source: nccl-tests, doc/PERFORMANCE.md and src/scatter.cu. Chapter 02.
    """
    check_world(world_size)
    if collective in WHOLE:
        return Fraction(1)
    if collective in TWICE + ONCE:
        return (2 if collective in TWICE else 1) * Fraction(world_size - 1, world_size)
    names = ", ".join(TWICE + ONCE + WHOLE)
    raise ValueError(f"collective is {collective!r}; it can be one of {names}")


def bus_bandwidth(
    collective: str, world_size: int, nbytes: float, seconds: float
) -> float:
    """Return what a measured time is worth: S / seconds x `bus_factor`, in bytes/s.

    Over equal links it is at most their bandwidth (`least_bytes`), and reaches it if
    nothing but bytes took time and none was sent in vain. Raises ValueError for another
    collective and unless `seconds` is above 0.
    Source: nccl-tests, doc/PERFORMANCE.md. Chapter 02.
    """
    check_world(world_size, nbytes)
    check_positive("seconds", seconds)
    return float(nbytes / seconds * bus_factor(collective, world_size))


def least_bytes(collective: str, world_size: int, nbytes: float) -> float:
    """Return a number of bytes that at least one rank must send or must receive.

    - all_reduce, 2(n-1)/n S: each element needs n-1 additions and n-1 copies, in all
      2(n-1) S bytes sent by n ranks (Patarasu & Yuan 2009).
    - reduce_scatter, (n-1)/n S: the additions alone; all_gather and all_to_all: each
      rank receives what it has not; scatter and gather: the root sends, or receives,
      all but its own part; broadcast and reduce, S: the root sends or receives all of
      it (Chan, Heimlich, Purkayastha & van de Geijn 2007).

    Nothing for n = 1. Raises ValueError for another collective. Chapters 02 and 03.
    """
    check_world(world_size, nbytes)
    factor = bus_factor(collective, world_size)
    return factor.numerator * nbytes / factor.denominator if world_size > 1 else 0


def least_messages(world_size: int) -> int:
    """Return how many messages must follow one another: ceil(log2 n).

    Wherever one rank's data concern all ranks, or one rank's result comes from all of
    them, that is in every collective of `bus_factor`: with each message in a row, the
    ranks concerned can at most double. Source: Chan et al. 2007. Chapters 02 and 03.
    """
    check_world(world_size)
    return log2_up(world_size)


def least_seconds(collective: str, world_size: int, nbytes: float, link: Link) -> float:
    """Return a time in seconds which no algorithm can beat over links like `link`.

    The larger of `least_messages` latencies and `least_bytes` at the link's bandwidth.
    Their sum would be too much to claim: hardly an algorithm attains both at once.
    Source: Patarasu & Yuan 2009, Chan et al. 2007. Chapter 03.
    """
    bytes_alone = Cost(0, least_bytes(collective, world_size, nbytes)).over(link)
    return max(bytes_alone, Cost(least_messages(world_size), 0).over(link))


def crossover(
    world_size: int,
    alpha: float,
    beta: float,
    other: Callable[[int, float], Cost] = all_reduce_double_tree,
) -> float:
    """Return the size in bytes from which on the ring is not slower than `other`.

    `other` is an all-reduce of `all_reduce`, `alpha` is in s, `beta` in s per byte.
    Every closed form there is m alpha + b S beta. The ring has m = 2(n-1) messages, as
    many as any, and b = 2(n-1)/n, as few as possible; equate the two times:

        m_ring alpha + b_ring S beta = m alpha + b S beta
        S = (m_ring - m) / (b - b_ring) x alpha / beta

    - naive: m = 2(n-1), so S = 0: the ring is never slower.
    - tree, with L = ceil(log2 n): m = 2L and b = 2L, so that
      S = (n-1-L) / (L - (n-1)/n) x alpha/beta.
    - double tree: m = 2L and b = 2, so that S = n (n-1-L) x alpha/beta.
    - halving-doubling, n = 2^k > 2: the same b, but fewer m: S = infinity.

    Additions are not counted. Raises ValueError for a negative alpha or beta. Source:
    derived as above. Chapter 03.
    """
    check_not_negative("alpha", alpha)
    check_not_negative("beta", beta)
    one = Fraction(1)  # S = 1 turns a cost's bytes into its b
    ring, rival = all_reduce_ring(world_size, one), other(world_size, one)
    later = (ring.messages - rival.messages) * alpha
    sooner = (rival.nbytes - ring.nbytes) * beta  # per byte of S
    if later <= 0:
        return 0.0
    return float(later / sooner) if sooner > 0 else math.inf
