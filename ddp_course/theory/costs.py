"""What a collective costs: messages and bytes that stand one after the other.

A message of m bytes takes alpha + beta m seconds: the "alpha-beta model" (Hockney
1994; for collectives Thakur, Rabenseifner & Gropp 2005). A rank can send one message
and receive another at the same time (full duplex) but not two of either, and any pairs
may talk at once (a switch that never blocks). Then an algorithm's time is the time of
its longest chain of messages, and a `Cost` says what is in that chain.

In every formula n is `world_size` and S is `nbytes`; what S counts is said for each
collective, and it is what nccl-tests calls the size. With `nbytes=Fraction(1)` the
results are exact multiples of S. One rank alone has nobody to talk to: n = 1 costs
nothing. All functions raise ValueError for n < 1 and S < 0. The all-reduces are in
`all_reduce`. Explained in chapter 02.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_course.launch import Link
from ddp_course.theory.checks import check_not_negative, check_world, log2_up


@dataclass(frozen=True)
class Cost:
    """What stands on the critical path of an algorithm, whatever the network.

    `messages` is how many latencies pass one after the other, `nbytes` how many bytes,
    and `added` how many of the bytes that arrive are combined with the receiver's own.
    Source: Thakur et al. 2005. Chapter 02.
    """

    messages: float
    nbytes: float
    added: float = 0

    def __add__(self, other: Cost) -> Cost:
        """One after the other."""
        return Cost(
            self.messages + other.messages,
            self.nbytes + other.nbytes,
            self.added + other.added,
        )

    def seconds(self, alpha: float, beta: float, gamma: float = 0.0) -> float:
        """Return the time: messages x alpha + nbytes x beta + added x gamma.

        `alpha` is in s per message, `beta` in s per byte sent, `gamma` in s per byte
        added; ValueError if one is negative or infinite.
        """
        for name, value in (("alpha", alpha), ("beta", beta), ("gamma", gamma)):
            check_not_negative(name, value)
        return float(self.messages * alpha + self.nbytes * beta + self.added * gamma)

    def over(self, link: Link, gamma: float = 0.0) -> float:
        """Return the time in seconds over links that are all like `link`."""
        return self.seconds(link.latency, 1 / link.bandwidth, gamma)


def send(nbytes: float) -> Cost:
    """One message of S bytes to another rank: alpha + S beta (chapter 02)."""
    check_not_negative("nbytes", nbytes)
    return Cost(1, nbytes)


def broadcast_naive(world_size: int, nbytes: float) -> Cost:
    """The root sends its S bytes to one rank after the other: (n-1)(alpha + S beta).

    The root's link is serial, all others are idle. Chapter 02.
    """
    check_world(world_size, nbytes)
    return Cost(world_size - 1, (world_size - 1) * nbytes)


def broadcast_tree(world_size: int, nbytes: float) -> Cost:
    """Whoever has the root's S bytes passes them on: ceil(log2 n)(alpha + S beta).

    A binomial tree, in which the number of ranks that have them doubles with every
    step (Thakur et al. 2005). Chapter 02.
    """
    check_world(world_size, nbytes)
    return Cost(log2_up(world_size), log2_up(world_size) * nbytes)


def scatter(world_size: int, nbytes: float) -> Cost:
    """The root sends another S/n bytes to every rank: (n-1) alpha + (n-1)/n S beta.

    S is what the root has; it keeps its own part. One after the other. Chapter 02.
    """
    check_world(world_size, nbytes)
    return Cost(world_size - 1, (world_size - 1) * nbytes / world_size)


def gather(world_size: int, nbytes: float) -> Cost:
    """Every rank sends its S/n bytes to the root: (n-1) alpha + (n-1)/n S beta.

    S is what the root has at the end. The messages leave from different ranks, but
    they arrive one after the other. Chapter 02.
    """
    return scatter(world_size, nbytes)


def reduce_naive(world_size: int, nbytes: float) -> Cost:
    """Each rank sends its S bytes to the root, which adds: (n-1)(alpha + S beta).

    The root adds (n-1) S bytes. Chapter 02.
    """
    check_world(world_size, nbytes)
    return Cost(world_size - 1, (world_size - 1) * nbytes, (world_size - 1) * nbytes)


def reduce_tree(world_size: int, nbytes: float) -> Cost:
    """Pairs add, then pairs of pairs, to the root: ceil(log2 n)(alpha + S beta).

    `broadcast_tree` backwards; S is what each rank has, and it is added in every step
    (Thakur et al. 2005). Chapter 02.
    """
    check_world(world_size, nbytes)
    steps = log2_up(world_size)
    return Cost(steps, steps * nbytes, steps * nbytes)


def all_gather(world_size: int, nbytes: float) -> Cost:
    """Every rank gets everyone's S/n bytes: (n-1) alpha + (n-1)/n S beta.

    S is what each rank has at the end. Around a ring: n-1 steps of S/n, in which each
    rank passes on what it received last (Thakur et al. 2005). Chapter 02.
    """
    check_world(world_size, nbytes)
    return Cost(world_size - 1, (world_size - 1) * nbytes / world_size)


def reduce_scatter(world_size: int, nbytes: float) -> Cost:
    """Each rank gets 1/n of the sum: (n-1) alpha + (n-1)/n S beta, (n-1)/n S added.

    S is what each rank has at the start. Around a ring: `all_gather` backwards, and
    what passes by is added (Patarasu & Yuan 2009). Chapter 02.
    """
    check_world(world_size, nbytes)
    part = (world_size - 1) * nbytes / world_size
    return Cost(world_size - 1, part, part)


def all_to_all(world_size: int, nbytes: float) -> Cost:
    """Each rank sends each other rank its own S/n: (n-1) alpha + (n-1)/n S beta.

    S is what each rank has, before and after. Pairwise: in step k rank r sends to rank
    r+k and receives from rank r-k (Thakur et al. 2005). Chapter 02.
    """
    check_world(world_size, nbytes)
    return Cost(world_size - 1, (world_size - 1) * nbytes / world_size)


def barrier(world_size: int) -> Cost:
    """Nobody goes on before all have come: ceil(log2 n) messages of one byte.

    Dissemination: in step k rank r tells rank r + 2^k, and hears of twice as many ranks
    as before (Hensgen, Finkel & Manber 1988). Chapter 02.
    """
    check_world(world_size)
    return Cost(log2_up(world_size), log2_up(world_size))
