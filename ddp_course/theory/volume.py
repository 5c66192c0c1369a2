"""How many bytes each rank sends: exact multiples of S, rank by rank.

A byte meter on every rank must show these numbers (for sizes that the algorithm can
divide into equal parts). S is the `nbytes` of `costs`, and a result of Fraction(3, 2)
means that this rank sends 3/2 S bytes. The algorithms are named like the functions of
`costs` and `all_reduce`. Explained in chapters 02 and 03.

The tree is binomial and starts at the root; counted from there (r = rank - root mod n),
rank r sends to r - 2^k in step k of a reduce, 2^k being its lowest set bit, and a
broadcast uses the same edges backwards. So 3 sends to 2, and then 2 to 0. (gloo's
broadcast numbers its tree the other way round, 1 to 3 and not 2 to 3: the same bytes in
all, but other ranks send them.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from ddp_course.theory.checks import (
    check_count,
    check_root,
    check_world,
    log2_up,
    power_below,
)


def children(rank: int, world_size: int) -> list[int]:
    """Return the ranks below `rank` in the binomial tree whose root is rank 0.

    In the order in which a broadcast sends to them, the largest subtree first: they are
    rank + 2^k for each 2^k below the rank's lowest set bit. Raises ValueError for a
    rank outside 0 to world_size - 1. Source: Thakur et al. 2005. Chapter 02.
    """
    check_world(world_size)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank is {rank}; it can be 0 to {world_size - 1}")
    lowest = (rank & -rank).bit_length() - 1 if rank else log2_up(world_size)
    below = [rank + (1 << k) for k in reversed(range(lowest))]
    return [child for child in below if child < world_size]


def _all_but_own(n: int, r: int) -> Fraction:
    return Fraction(n - 1, n)


def _root_sends(n: int, r: int) -> Fraction:
    return Fraction(n - 1 if r == 0 else 0)


def _others_send(n: int, r: int) -> Fraction:
    return Fraction(0 if r == 0 else 1)


def _to_children(n: int, r: int) -> Fraction:
    return Fraction(len(children(r, n)))


def _halving_doubling(n: int, r: int) -> Fraction:
    p = power_below(n)
    if r >= p:
        return Fraction(1)  # its tensor, to rank r - p
    back = 1 if r + p < n else 0  # the result, to rank r + p
    return 2 * Fraction(p - 1, p) + back


# How many S rank r sends; for those with a root, r is counted from the root.
WITH_ROOT: dict[str, Callable[[int, int], Fraction]] = {
    "broadcast_naive": _root_sends,
    "broadcast_tree": _to_children,
    "scatter": lambda n, r: _root_sends(n, r) / n,
    "gather": lambda n, r: _others_send(n, r) / n,
    "reduce_naive": _others_send,
    "reduce_tree": _others_send,
    "all_reduce_naive": lambda n, r: _others_send(n, r) + _root_sends(n, r),
    "all_reduce_tree": lambda n, r: _others_send(n, r) + _to_children(n, r),
}
WITHOUT_ROOT: dict[str, Callable[[int, int], Fraction]] = {
    "all_gather": _all_but_own,
    "reduce_scatter": _all_but_own,
    "all_to_all": _all_but_own,
    "all_reduce_ring": lambda n, r: 2 * _all_but_own(n, r),
    "all_reduce_halving_doubling": _halving_doubling,
}


def bytes_sent(algorithm: str, world_size: int, root: int = 0) -> list[Fraction]:
    """Return, for every rank in rank order, the bytes it sends, in multiples of S.

    `algorithm` is a name of `WITH_ROOT` or of `WITHOUT_ROOT`; for the former, `root`
    says which rank is the root. Raises ValueError for another name, for a root outside
    0 to world_size - 1, and for a root where there is none. All that all-reduces send,
    added over the ranks, is 2(n-1) S, whichever the algorithm: each of the n-1 other
    tensors is sent once to be added, and the result n-1 times to be kept (nccl-tests,
    PERFORMANCE.md). Chapters 02 and 03.
    """
    check_world(world_size)
    check_root(root, world_size)
    rule = (WITH_ROOT | WITHOUT_ROOT).get(algorithm)
    if rule is None:
        names = ", ".join([*WITH_ROOT, *WITHOUT_ROOT])
        raise ValueError(f"algorithm is {algorithm!r}; it can be one of {names}")
    if root and algorithm in WITHOUT_ROOT:
        raise ValueError(f"root is {root}, but {algorithm} has no root: leave it 0")
    return [rule(world_size, (rank - root) % world_size) for rank in range(world_size)]


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
    ring = 2 * Fraction(nnodes - 1, nnodes)
    if variant == "leader":
        inside = bytes_sent("all_reduce_tree", nproc_per_node)
        between = [ring] + [Fraction(0)] * (nproc_per_node - 1)
    elif variant == "sharded":
        inside = bytes_sent("all_reduce_ring", nproc_per_node)
        between = [ring / nproc_per_node] * nproc_per_node
    else:
        raise ValueError(f"variant is {variant!r}; it can be 'leader' or 'sharded'")
    node = [HierarchicalBytes(i, b) for i, b in zip(inside, between, strict=True)]
    return node * nnodes


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
    half, zero = _all_but_own(world_size, 0), Fraction(0)
    if variant == "staged":
        rank = SharedMemoryBytes(sent=zero, read=2 * half, written=zero)
    elif variant == "registered":
        rank = SharedMemoryBytes(sent=zero, read=half, written=half)
    else:
        raise ValueError(f"variant is {variant!r}; it can be 'staged' or 'registered'")
    return [rank] * world_size
