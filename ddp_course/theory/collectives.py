"""What a collective costs, algorithm by algorithm: one table, and what follows from it.

A message of m bytes takes alpha + beta m seconds: the "alpha-beta model" (Hockney
1994; for collectives Thakur, Rabenseifner & Gropp 2005). A rank can send one message
and receive another at the same time (full duplex) but not two of either, and any pairs
may talk at once (a switch that never blocks). Then an algorithm's time is the time of
its longest chain of messages, and a `Cost` says what is in that chain.

In every formula n is `world_size` and S is `nbytes`, what nccl-tests calls the size: of
scatter what the root has at the start, of gather at the end; of a reduce or all-reduce
what each rank has; of all-gather what each has at the end, of reduce-scatter at the
start. With `nbytes=Fraction(1)` results are exact multiples of S. One rank alone has
nobody to talk to: n = 1 costs nothing. ValueError for n < 1 and S < 0. Explained in
chapters 02 and 03.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ddp_course.launch import Link, Links
from ddp_course.theory.checks import (
    check_count,
    check_not_negative,
    check_positive,
    check_root,
    check_world,
    log2_up,
    power_below,
)


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


# ---- the table -----------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    """A row of the table: called with (world_size, nbytes), it returns the `Cost`.

    Attributes:
        about: what it does, the source, the chapter.
        messages: of n, how many stand one after the other.
        nbytes, added: of n, likewise, in multiples of S.
        sent: of n and r, how many S rank r sends; r is counted from the root, if there
            is one. None where that depends on the size of its pieces.
        root: whether there is a root.
    """

    about: str
    messages: Callable[[int], int]
    nbytes: Callable[[int], Fraction | int]
    added: Callable[[int], Fraction | int]
    sent: Callable[[int, int], Fraction | int] | None
    root: bool = False

    def __call__(self, world_size: int, nbytes: float) -> Cost:
        """Return what it costs for a tensor of `nbytes`."""
        n = world_size
        check_world(n, nbytes)
        times = (
            Fraction(of_s(n)) if n > 1 else Fraction(0)
            for of_s in (self.nbytes, self.added)
        )
        return Cost(
            self.messages(n), *(f.numerator * nbytes / f.denominator for f in times)
        )

    def then(self, other: Algorithm, about: str) -> Algorithm:
        """Return one after the other."""
        return Algorithm(
            about,
            lambda n: self.messages(n) + other.messages(n),
            lambda n: self.nbytes(n) + other.nbytes(n),
            lambda n: self.added(n) + other.added(n),
            lambda n, r: self.sent(n, r) + other.sent(n, r),
            self.root or other.root,
        )


def children(rank: int, world_size: int) -> list[int]:
    """Return the ranks below `rank` in the binomial tree whose root is rank 0.

    In the order in which a broadcast sends to them, the largest subtree first: they are
    rank + 2^k for each 2^k below the rank's lowest set bit; a reduce uses the same
    edges backwards. So 3 sends to 2, and then 2 to 0. (gloo's broadcast numbers its
    tree the other way round, 1 to 3 and not 2 to 3: the same bytes in all, but other
    ranks send them.) Raises ValueError for a rank outside 0 to world_size - 1. Source:
    Thakur et al. 2005. Chapter 02.
    """
    check_world(world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; it can be 0 to {world_size - 1}")
    lowest = (rank & -rank).bit_length() - 1 if rank else log2_up(world_size)
    below = [rank + (1 << k) for k in reversed(range(lowest))]
    return [child for child in below if child < world_size]


def _but_one(n: int, r: int = 0) -> int:
    return n - 1


def _nothing(n: int) -> int:
    return 0


def _part(n: int, r: int = 0) -> Fraction:
    """All but the own n-th."""
    return Fraction(n - 1, n)


def _others(n: int, r: int) -> int:
    return 0 if r == 0 else 1


def _fold(n: int) -> int:
    """1 if some ranks are too many for a power of two."""
    return int(power_below(n) != n)


def _halved(n: int, r: int) -> Fraction | int:
    p = power_below(n)  # ranks from p on send their tensor to rank r - p, and get the
    return 1 if r >= p else 2 * _part(p) + (r + p < n)  # result from there


ALGORITHMS = {
    "broadcast_naive": Algorithm(
        """The root sends its S bytes to one after the other: (n-1)(alpha + S beta).

        The root's link is serial, all others are idle. Chapter 02.""",
        *(_but_one, _but_one, _nothing),
        sent=lambda n, r: n - 1 if r == 0 else 0,
        root=True,
    ),
    "broadcast_tree": Algorithm(
        """Whoever has the root's S bytes passes them on: ceil(log2 n)(alpha + S beta).

        A binomial tree, in which the number of ranks that have them doubles with every
        step (Thakur et al. 2005). Chapter 02.""",
        *(log2_up, log2_up, _nothing),
        sent=lambda n, r: len(children(r, n)),
        root=True,
    ),
    "scatter": Algorithm(
        """The root sends another S/n bytes to each: (n-1) alpha + (n-1)/n S beta.

        One after the other; it keeps its own part. Chapter 02.""",
        *(_but_one, _part, _nothing),
        sent=lambda n, r: _part(n) if r == 0 else 0,
        root=True,
    ),
    "gather": Algorithm(
        """Every rank sends its S/n bytes to the root: (n-1) alpha + (n-1)/n S beta.

        The messages leave from different ranks, but arrive one after the other.
        Chapter 02.""",
        *(_but_one, _part, _nothing),
        sent=lambda n, r: Fraction(_others(n, r), n),
        root=True,
    ),
    "reduce_naive": Algorithm(
        """Each rank sends its S bytes to the root, which adds: (n-1)(alpha + S beta).

        The root adds (n-1) S bytes. Chapter 02.""",
        *(_but_one, _but_one, _but_one),
        sent=_others,
        root=True,
    ),
    "reduce_tree": Algorithm(
        """Pairs add, then pairs of pairs, to the root: ceil(log2 n)(alpha + S beta).

        `broadcast_tree` backwards; S is added in every step (Thakur et al. 2005).
        Chapter 02.""",
        *(log2_up, log2_up, log2_up),
        sent=_others,
        root=True,
    ),
    "all_gather": Algorithm(
        """Every rank gets everyone's S/n bytes: (n-1) alpha + (n-1)/n S beta.

        Around a ring: n-1 steps of S/n, in which each rank passes on what it received
        last (Thakur et al. 2005). Chapter 02.""",
        *(_but_one, _part, _nothing),
        sent=_part,
    ),
    "reduce_scatter": Algorithm(
        """Each rank gets 1/n of the sum: (n-1) alpha + (n-1)/n S beta, as much added.

        Around a ring: `all_gather` backwards, and what passes by is added (Patarasu &
        Yuan 2009). Chapter 02.""",
        *(_but_one, _part, _part),
        sent=_part,
    ),
    "all_to_all": Algorithm(
        """Each rank sends each other rank its own S/n: (n-1) alpha + (n-1)/n S beta.

        Pairwise: in step k rank r sends to rank r+k and receives from rank r-k (Thakur
        et al. 2005). Chapter 02.""",
        *(_but_one, _part, _nothing),
        sent=_part,
    ),
    "all_reduce_double_tree": Algorithm(
        """Up and down two trees, in many small pieces: 2 ceil(log2 n) alpha + 2 S beta.

        Each tree carries half of the tensor, and a rank that is a leaf of one is inside
        the other, so that every rank sends and receives all the time. (Two ranks send
        S/2 up one tree and S/2 down the other: 2 alpha + S beta.) The limit of pieces
        so small that filling the trees takes no time, and so many that it is a limit
        only: their latencies are not counted (Sanders, Speck & Traeff 2009; NCCL since
        2.4). Chapter 03.""",
        lambda n: 2 * log2_up(n),
        lambda n: 1 if n == 2 else 2,
        lambda n: Fraction(1, 2) if n == 2 else 1,
        sent=None,
    ),
    "all_reduce_halving_doubling": Algorithm(
        """Swap halves, then quarters, ..., and back: 2 log2(n) alpha + 2(n-1)/n S beta.

        For n = 2^k (Rabenseifner's algorithm, Thakur et al. 2005). For another n, with
        p the largest power of two below: each of the ranks p to n-1 first adds its
        tensor into that of rank r-p and at the end gets the result from there. That is
        two messages, 2 S bytes and S added more than for p. Chapter 03.""",
        lambda n: 2 * log2_up(power_below(n)) + 2 * _fold(n),
        lambda n: 2 * _part(power_below(n)) + 2 * _fold(n),
        lambda n: _part(power_below(n)) + _fold(n),
        sent=_halved,
    ),
}
_of = ALGORITHMS
ALGORITHMS |= {
    "all_reduce_naive": _of["reduce_naive"].then(
        _of["broadcast_naive"],
        "To rank 0, which adds, and back to all: 2(n-1)(alpha + S beta). Chapter 03.",
    ),
    "all_reduce_tree": _of["reduce_tree"].then(
        _of["broadcast_tree"],
        "Up a binomial tree and down: 2 ceil(log2 n)(alpha + S beta). Chapter 03.",
    ),
    "all_reduce_ring": _of["reduce_scatter"].then(
        _of["all_gather"],
        """Around the ring twice, S/n a step: 2(n-1) alpha + 2(n-1)/n S beta.

        No algorithm sends fewer bytes (Patarasu & Yuan 2009). Chapter 03.""",
    ),
}

broadcast_naive, broadcast_tree = _of["broadcast_naive"], _of["broadcast_tree"]
scatter, gather = _of["scatter"], _of["gather"]
reduce_naive, reduce_tree = _of["reduce_naive"], _of["reduce_tree"]
all_gather, reduce_scatter = _of["all_gather"], _of["reduce_scatter"]
all_to_all = _of["all_to_all"]
all_reduce_naive, all_reduce_tree = _of["all_reduce_naive"], _of["all_reduce_tree"]
all_reduce_ring = _of["all_reduce_ring"]
all_reduce_double_tree = _of["all_reduce_double_tree"]
all_reduce_halving_doubling = _of["all_reduce_halving_doubling"]


def send(nbytes: float) -> Cost:
    """One message of S bytes to another rank: alpha + S beta (chapter 02)."""
    check_not_negative("nbytes", nbytes)
    return Cost(1, nbytes)


def barrier(world_size: int) -> Cost:
    """Nobody goes on before all have come: ceil(log2 n) messages of one byte.

    Dissemination: in step k rank r tells rank r + 2^k, and hears of twice as many ranks
    as before (Hensgen, Finkel & Manber 1988). Chapter 02.
    """
    check_world(world_size)
    return Cost(log2_up(world_size), log2_up(world_size))


def bytes_sent(algorithm: str, world_size: int, root: int = 0) -> list[Fraction]:
    """Return, for every rank in rank order, the bytes it sends, in multiples of S.

    A byte meter on every rank must show these numbers (for sizes that the algorithm can
    divide into equal parts). `algorithm` is a name in ALGORITHMS; if it has a root,
    `root` says which rank that is. Raises ValueError for another name, for a root
    outside 0 to world_size - 1, and for a root where there is none. All that an
    all-reduce sends, added over the ranks, is 2(n-1) S, whichever the algorithm: each
    of the n-1 other tensors is sent once to be added, and the result n-1 times to be
    kept (nccl-tests, PERFORMANCE.md). Chapters 02 and 03.
    """
    check_world(world_size)
    check_root(root, world_size)
    known = {name: row for name, row in ALGORITHMS.items() if row.sent is not None}
    if algorithm not in known:
        raise ValueError(
            f"algorithm is {algorithm!r}; it can be one of {', '.join(known)}"
        )
    if root and not known[algorithm].root:
        raise ValueError(f"root is {root}, but {algorithm} has no root: leave it 0")
    sent = known[algorithm].sent
    return [
        Fraction(sent(world_size, (r - root) % world_size)) for r in range(world_size)
    ]


# ---- two levels, and shared memory ---------------------------------------------------


def _check_variant(variant: str, first: str, second: str) -> None:
    if variant not in (first, second):
        raise ValueError(f"variant is {variant!r}; it can be {first!r} or {second!r}")


@dataclass(frozen=True)
class HierarchicalCost:
    """What is on the critical path `inside` the nodes and `between` them.

    Both are a `Cost`; they are kept apart since the links differ. Chapter 03.
    """

    inside: Cost
    between: Cost

    def seconds(self, links: Links, gamma: float = 0.0) -> float:
        """Return the time in s: `inside` over `links.inside` plus `between`, likewise.

        `gamma` is in s per byte added.
        """
        inside = self.inside.over(links.inside, gamma)
        return inside + self.between.over(links.between, gamma)


def all_reduce_hierarchical(
    nnodes: int, nproc_per_node: int, nbytes: float, variant: str = "sharded"
) -> HierarchicalCost:
    """First inside each node, then between the nodes, then inside again.

    With G nodes of g ranks each (n = G g):

    - "leader": a tree brings each node's sum to its first rank, the leader; the leaders
      run a ring among them; a tree takes the result to the others. Inside
      2 ceil(log2 g)(alpha + S beta), between 2(G-1) alpha + 2(G-1)/G S beta.
    - "sharded": a ring reduce-scatter inside leaves each rank with S/g of its node's
      sum; the ranks with the same local rank run a ring on it; a ring all-gather inside
      ends it. Inside 2(g-1) alpha + 2(g-1)/g S beta, between 2(G-1) alpha +
      2(G-1)/G S/g beta: each node sends as much as before, but from g ranks at once.
      If they share one network card per node, multiply these bytes by g.

    Raises ValueError for another variant. Source: Cho et al., BlueConnect, MLSys 2019;
    the first is Horovod's hierarchical all-reduce in its simplest form. Chapter 03.
    """
    check_count("nnodes", nnodes)
    check_count("nproc_per_node", nproc_per_node)
    check_not_negative("nbytes", nbytes)
    _check_variant(variant, "leader", "sharded")
    inside, parts = all_reduce_tree, 1
    if variant == "sharded":
        inside, parts = all_reduce_ring, nproc_per_node
    return HierarchicalCost(
        inside=inside(nproc_per_node, nbytes),
        between=all_reduce_ring(nnodes, nbytes / parts),
    )


@dataclass(frozen=True)
class HierarchicalBytes:
    """What one rank sends to ranks of its node and to other nodes, in multiples of S.

    Chapter 03.
    """

    inside: Fraction
    between: Fraction


def hierarchical_bytes_sent(
    nnodes: int, nproc_per_node: int, variant: str = "sharded"
) -> list[HierarchicalBytes]:
    """Return, for every rank in rank order, what it sends in a hierarchical all-reduce.

    The variants are those of `all_reduce_hierarchical`. "leader": the ranks of a node
    send as in "all_reduce_tree", and local rank 0 alone sends 2(G-1)/G S to another
    node. "sharded": each rank sends 2(g-1)/g S inside and 2(G-1)/G S/g between. Both
    send 2(G-1) S between nodes in total. Raises ValueError for another variant.
    Source: Cho et al., BlueConnect, MLSys 2019. Chapter 03.
    """
    check_count("nnodes", nnodes)
    check_count("nproc_per_node", nproc_per_node)
    _check_variant(variant, "leader", "sharded")
    ring = 2 * _part(nnodes)
    if variant == "leader":
        inside = bytes_sent("all_reduce_tree", nproc_per_node)
        between = [ring] + [Fraction(0)] * (nproc_per_node - 1)
    else:
        inside = bytes_sent("all_reduce_ring", nproc_per_node)
        between = [ring / nproc_per_node] * nproc_per_node
    return [*map(HierarchicalBytes, inside, between)] * nnodes


@dataclass(frozen=True)
class SharedMemoryBytes:
    """What one rank does in an all-reduce through shared memory, in multiples of S.

    `sent` goes over a wire, `read` is read from other ranks' memory, `written` is
    written into it. Copies within the rank's own memory are not counted. Chapter 03.
    """

    sent: Fraction
    read: Fraction
    written: Fraction


def shared_memory_bytes(
    world_size: int, variant: str = "staged"
) -> list[SharedMemoryBytes]:
    """Return, for every rank, what it moves in an all-reduce through shared memory.

    Nothing is sent: the ranks are on one node and look into each other's memory. Each
    adds 1/n of the tensor, for which it reads (n-1)/n S from its peers.

    - "staged": each has left its tensor in a segment that all can read, leaves its part
      of the sum there, too, and reads the n-1 other parts: 2(n-1)/n S read.
    - "registered": the tensors themselves are in shared memory, and each writes its
      part of the sum into those of the n-1 others: (n-1)/n S read, (n-1)/n S written.

    Raises ValueError for another variant. Source: counted, as for the ring: these are
    the bytes of a reduce-scatter and of an all-gather. Chapter 03.
    """
    check_world(world_size)
    _check_variant(variant, "staged", "registered")
    part, zero = _part(world_size), Fraction(0)
    moved = (2 * part, zero) if variant == "staged" else (part, part)
    return [SharedMemoryBytes(zero, *moved)] * world_size


# ---- how good it can be, how good a measured one is, which is better when ------------

BUS_FACTORS = {
    "all_reduce": 2,
    **dict.fromkeys(
        ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather"), 1
    ),
    **dict.fromkeys(("broadcast", "reduce"), None),  # all of it
}


def bus_factor(collective: str, world_size: int) -> Fraction:
    """Return busbw / algbw, which makes numbers comparable across world sizes.

    2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter, all_to_all, scatter
    and gather, 1 for broadcast and reduce (even for n = 1). Raises ValueError for
    another name. Source: nccl-tests, doc/PERFORMANCE.md and src/scatter.cu. Chapter 02.
    """
    check_world(world_size)
    if collective not in BUS_FACTORS:
        raise ValueError(
            f"collective is {collective!r}; it can be one of {', '.join(BUS_FACTORS)}"
        )
    times = BUS_FACTORS[collective]
    return Fraction(1) if times is None else times * _part(world_size)


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

    `other` is an all-reduce of the table, `alpha` is in s, `beta` in s per byte. Every
    closed form there is m alpha + b S beta. The ring has m = 2(n-1) messages, as many
    as any, and b = 2(n-1)/n, as few as possible; equate the two times:

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
