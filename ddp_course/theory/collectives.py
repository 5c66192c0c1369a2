"""The costs of collectives: a table of algorithms, and functions that use it.

A message of m bytes takes alpha + beta m seconds: the "alpha-beta model" (Hockney
1994; for collectives Thakur, Rabenseifner & Gropp 2005). A rank can send one message
and receive another at the same time (full duplex) but not two of either, and any pairs
may talk at once (a switch that never blocks). Then an algorithm's time is the time of
its longest chain of messages, and a `Cost` has the messages and bytes of that chain.

In every formula n is `world_size`, and S is `nbytes`, which nccl-tests calls the size:
for scatter, the root's tensor at the start; for gather, the root's at the end; for
reduce and all-reduce, each rank's tensor; for all-gather, each rank's at the end; for
reduce-scatter, each rank's at the start. With `nbytes=Fraction(1)` results are exact
multiples of S. With n = 1 nothing is sent, and the cost is 0.
Explained in chapters 02 and 03.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from ddp_course.theory.checks import (
    check_choice,
    check_count,
    log2_up,
    power_below,
)

if TYPE_CHECKING:  # links import PyTorch, which formulas do not need
    from ddp_course.launch import Link, Links


@dataclass(frozen=True)
class Cost:
    """The length of an algorithm's critical path, for any network.

    `messages` is the number of latencies on the path, `nbytes` the number of bytes. The
    time of additions is not counted. Chapter 02.
    """

    messages: float
    nbytes: float

    def seconds(self, alpha: float, beta: float) -> float:
        """Return the time: messages x alpha + nbytes x beta.

        `alpha` is in s per message, `beta` in s per byte.
        """
        return float(self.messages * alpha + self.nbytes * beta)

    def over(self, link: Link) -> float:
        """Return the time in seconds, if all links are like `link`."""
        return self.seconds(link.latency, 1 / link.bandwidth)


# ---- the table -----------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    """A row of the table: called with (world_size, nbytes), it returns the `Cost`.

    Attributes:
        about: the algorithm, its time, its source.
        messages: a function of n: messages on the critical path.
        nbytes: a function of n: bytes on the critical path, in multiples of S.
        sent: a function of n and r: bytes that rank r sends, in multiples of S; the
            root is rank 0. None if it depends on the size of the pieces.
    """

    about: str
    messages: Callable[[int], int]
    nbytes: Callable[[int], Fraction | int]
    sent: Callable[[int, int], Fraction | int] | None

    def __call__(self, world_size: int, nbytes: float) -> Cost:
        """Return the cost for a tensor of `nbytes`."""
        check_count("world_size", world_size)
        times = Fraction(self.nbytes(world_size) if world_size > 1 else 0)
        return Cost(
            self.messages(world_size), times.numerator * nbytes / times.denominator
        )

    def then(self, other: Algorithm, about: str) -> Algorithm:
        """Return the algorithm that runs this one, and then `other`."""
        return Algorithm(
            about,
            lambda n: self.messages(n) + other.messages(n),
            lambda n: self.nbytes(n) + other.nbytes(n),
            lambda n, r: self.sent(n, r) + other.sent(n, r),
        )


def children(rank: int, world_size: int) -> list[int]:
    """Return the ranks below `rank` in the binomial tree whose root is rank 0.

    They are rank + 2^k for each 2^k below the rank's lowest set bit, in the order in
    which a broadcast sends to them: the largest subtree first. A reduce uses the same
    edges backwards: 3 sends to 2, and then 2 to 0. (In gloo's broadcast the tree has
    other edges, 1 to 3 and not 2 to 3: the total bytes are the same, but other ranks
    send them.) Raises ValueError for a rank outside 0 to world_size - 1. Source: Thakur
    et al. 2005. Chapter 02.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; it can be 0 to {world_size - 1}")
    lowest = (rank & -rank).bit_length() - 1 if rank else log2_up(world_size)
    below = [rank + (1 << k) for k in reversed(range(lowest))]
    return [child for child in below if child < world_size]


def _but_one(n: int, r: int = 0) -> int:
    return n - 1 if r == 0 else 0


def _part(n: int, r: int = 0) -> Fraction:
    """Return (n-1)/n: all parts of a tensor except the rank's own."""
    return Fraction(n - 1, n)


def _others(n: int, r: int) -> int:
    return 0 if r == 0 else 1


def _to_children(n: int, r: int) -> int:
    return len(children(r, n))


def _fold(n: int) -> int:
    """Return 2 if n is no power of two: messages of each extra rank, there and back."""
    return 2 * (power_below(n) != n)


def _halved(n: int, r: int) -> Fraction | int:
    p = power_below(n)
    # Rank r from p on sends its tensor to rank r - p, and receives the result from it.
    return 1 if r >= p else 2 * _part(p) + (r + p < n)


broadcast_naive = Algorithm(
    "The root sends S to one rank after the other: (n-1)(alpha + S beta).",
    *(_but_one, _but_one, _but_one),
)
broadcast_tree = Algorithm(
    "Ranks that have S pass it on, in a binomial tree: ceil(log2 n)(alpha + S beta).",
    *(log2_up, log2_up, _to_children),
)
scatter = Algorithm(
    "The root sends each rank its S/n, in turn: (n-1) alpha + (n-1)/n S beta.",
    *(_but_one, _part, lambda n, r: Fraction(_but_one(n, r), n)),
)
gather = Algorithm(
    "Each rank sends its S/n to the root, one after the other: as `scatter`.",
    *(_but_one, _part, lambda n, r: Fraction(_others(n, r), n)),
)
reduce_naive = Algorithm(
    "Each rank sends S to the root, which adds: (n-1)(alpha + S beta).",
    *(_but_one, _but_one, _others),
)
reduce_tree = Algorithm(
    "`broadcast_tree` backwards: pairs add, then pairs of pairs, to the root.",
    *(log2_up, log2_up, _others),
)
all_gather = Algorithm(
    "A ring: n-1 steps of S/n, in which each rank passes on what it received last:"
    " (n-1) alpha + (n-1)/n S beta.",
    *(_but_one, _part, _part),
)
reduce_scatter = Algorithm(
    "`all_gather` backwards, adding what passes by (Patarasuk & Yuan 2009).",
    *(_but_one, _part, _part),
)
all_to_all = Algorithm(
    "In step k rank r sends its S/n to rank r+k: (n-1) alpha + (n-1)/n S beta.",
    *(_but_one, _part, _part),
)
all_reduce_naive = reduce_naive.then(
    broadcast_naive,
    "All send to rank 0, which adds and sends to all: 2(n-1)(alpha + S beta).",
)
all_reduce_tree = reduce_tree.then(
    broadcast_tree, "Up a tree and down again: 2 ceil(log2 n)(alpha + S beta)."
)
all_reduce_ring = reduce_scatter.then(
    all_gather,
    "Around the ring twice, S/n a step: 2(n-1) alpha + 2(n-1)/n S beta. No algorithm"
    " sends fewer bytes (Patarasuk & Yuan 2009).",
)
all_reduce_halving_doubling = Algorithm(
    "Swap halves, then quarters, ..., and back: 2 log2(n) alpha + 2(n-1)/n S beta, for"
    " n = 2^k (Rabenseifner; Thakur et al. 2005). For another n, with p the largest"
    " power of two below, each rank from p on first gives its tensor to rank r-p, and"
    " gets the result from there: 2 messages and 2 S more than for p.",
    lambda n: 2 * log2_up(power_below(n)) + _fold(n),
    lambda n: 2 * _part(power_below(n)) + _fold(n),
    _halved,
)
all_reduce_double_tree = Algorithm(
    "Up and down two trees at once, half of S in each; a leaf of one is inside the"
    " other: 2 ceil(log2 n) alpha + 2 S beta (for two ranks: S beta). The limit of many"
    " small pieces whose latencies are not counted (Sanders, Speck & Traeff 2009; NCCL"
    " since 2.4).",
    *(lambda n: 2 * log2_up(n), lambda n: 1 if n == 2 else 2, None),
)
ALGORITHMS = {
    name: row for name, row in globals().items() if isinstance(row, Algorithm)
}


def bytes_sent(algorithm: str, world_size: int) -> list[Fraction]:
    """Return, for every rank in rank order, the bytes it sends, in multiples of S.

    A byte meter on every rank must show these numbers (for sizes that the algorithm can
    divide into equal parts). `algorithm` is a name in ALGORITHMS; the root, if there
    is one, is rank 0. Raises ValueError for another name. All ranks of an all-reduce
    together send 2(n-1) S, for every algorithm: n-1 tensors are sent to be added, and
    the result is sent to n-1 ranks (nccl-tests, PERFORMANCE.md). Chapters 02 and 03.
    """
    known = {name: row for name, row in ALGORITHMS.items() if row.sent is not None}
    check_choice("algorithm", algorithm, known)
    sent = known[algorithm].sent
    return [Fraction(sent(world_size, rank)) for rank in range(world_size)]


# ---- two levels ----------------------------------------------------------------------


@dataclass(frozen=True)
class TwoLevels:
    """The costs `inside` the nodes and `between` them, which have different links.

    Each is a `Cost`, or the bytes that one rank sends, in multiples of S. Chapter 03.
    """

    inside: Cost | Fraction
    between: Cost | Fraction

    def seconds(self, links: Links) -> float:
        """Return the time in s: `inside` over `links.inside`, then `between`."""
        return self.inside.over(links.inside) + self.between.over(links.between)


def all_reduce_hierarchical(
    nnodes: int, nproc_per_node: int, nbytes: float, variant: str = "sharded"
) -> TwoLevels:
    """Return the costs of an all-reduce that sums inside each node, then between nodes.

    With G nodes of g ranks each (n = G g):

    - "leader": a tree brings each node's sum to its first rank, the leader; the leaders
      run a ring among them; a tree takes the result to the others. Inside
      2 ceil(log2 g)(alpha + S beta), between 2(G-1) alpha + 2(G-1)/G S beta.
    - "sharded": a ring reduce-scatter inside leaves each rank with S/g of its node's
      sum; the ranks with the same local rank run a ring on it; a ring all-gather inside
      joins the results. Inside 2(g-1) alpha + 2(g-1)/g S beta, between 2(G-1) alpha +
      2(G-1)/G S/g beta: each node sends as much as with "leader", but from g ranks at
      once. If these share one network card, multiply the bytes between nodes by g.

    Raises ValueError for another variant. Sources: "leader" is the simplest form of
    Horovod's hierarchical all-reduce; "sharded" is Cho et al., BlueConnect, MLSys 2019.
    Chapter 03.
    """
    inside, parts = _inside(nnodes, nproc_per_node, variant)
    across = all_reduce_ring(nnodes, nbytes / parts)
    return TwoLevels(ALGORITHMS[inside](nproc_per_node, nbytes), across)


def hierarchical_bytes_sent(
    nnodes: int, nproc_per_node: int, variant: str = "sharded"
) -> list[TwoLevels]:
    """Return the bytes that each rank sends in a hierarchical all-reduce, by rank.

    For the variants of `all_reduce_hierarchical`, in multiples of S. "leader": the
    ranks of a node send as in "all_reduce_tree", and only local rank 0 sends 2(G-1)/G
    to another node. "sharded": each rank sends 2(g-1)/g inside and 2(G-1)/G /g between.
    In both, 2(G-1) S are sent between nodes in total. Raises ValueError for another
    variant. Chapter 03.
    """
    inside, parts = _inside(nnodes, nproc_per_node, variant)
    sent, across = bytes_sent(inside, nproc_per_node), 2 * _part(nnodes) / parts
    return [
        TwoLevels(own, across if local_rank < parts else Fraction(0))
        for local_rank, own in enumerate(sent)
    ] * nnodes


def _inside(nnodes: int, nproc_per_node: int, variant: str) -> tuple[str, int]:
    """Return the algorithm inside a node, and how many ranks send to other nodes."""
    check_choice("variant", variant, ("leader", "sharded"))
    check_count("nnodes", nnodes)
    check_count("nproc_per_node", nproc_per_node)
    if variant == "leader":
        return "all_reduce_tree", 1
    return "all_reduce_ring", nproc_per_node


# ---- lower bounds, bus bandwidth, crossover ------------------------------------------

BUS_FACTORS = {"all_reduce": 2, "broadcast": None, "reduce": None}  # None: factor 1
BUS_FACTORS |= {"all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
BUS_FACTORS |= {"scatter": 1, "gather": 1}


def bus_factor(collective: str, world_size: int) -> Fraction:
    """Return busbw / algbw, which makes numbers comparable across world sizes.

    2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter, all_to_all, scatter
    and gather, 1 for broadcast and reduce (even for n = 1). Raises ValueError for
    another name. Source: nccl-tests, doc/PERFORMANCE.md and src/scatter.cu. Chapter 02.
    """
    check_choice("collective", collective, BUS_FACTORS)
    times = BUS_FACTORS[collective]
    return Fraction(1) if times is None else times * _part(world_size)


def least_bytes(collective: str, world_size: int, nbytes: float) -> float:
    """Return a number of bytes that at least one rank must send or must receive.

    - all_reduce, 2(n-1)/n S: each element needs n-1 additions and n-1 copies, in all
      2(n-1) S bytes sent by n ranks (Patarasuk & Yuan 2009).
    - reduce_scatter, (n-1)/n S: the additions alone; all_gather and all_to_all: each
      rank receives the parts that it lacks; scatter and gather: the root sends, or
      receives, all but its own part; broadcast and reduce, S: the root sends or
      receives all of it (Chan, Heimlich, Purkayastha & van de Geijn 2007).

    0 for n = 1. Raises ValueError for another collective. Chapters 02 and 03.
    """
    factor = bus_factor(collective, world_size)
    return factor.numerator * nbytes / factor.denominator if world_size > 1 else 0


def crossover(world_size: int, alpha: float, beta: float) -> float:
    """Return the bytes from which on a ring is at least as fast as a double tree.

    `alpha` is in s, `beta` in s per byte. Every closed form of the table is
    m alpha + b S beta. The ring has m = 2(n-1) messages, as many as any, and
    b = 2(n-1)/n, as few as possible; equate the two times:

        m_ring alpha + b_ring S beta = m alpha + b S beta
        S = (m_ring - m) / (b - b_ring) x alpha / beta

    The double tree, with L = ceil(log2 n), has m = 2L and b = 2, so that
    S = n (n-1-L) x alpha/beta. Source: derived as above. Chapter 03.
    """
    one = Fraction(1)  # S = 1 turns a cost's bytes into its b
    ring, tree = (f(world_size, one) for f in (all_reduce_ring, all_reduce_double_tree))
    later = (ring.messages - tree.messages) * alpha
    sooner = (tree.nbytes - ring.nbytes) * beta  # per byte of S
    if later <= 0:
        return 0.0
    return float(later / sooner) if sooner > 0 else math.inf
