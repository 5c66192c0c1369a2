"""What an all-reduce costs, algorithm by algorithm: they differ in who sends.

The model and the conventions are those of `costs`; S, `nbytes`, is the size of the
tensor that every rank has before and after. For every rank to have the sum, all the
algorithms here send 2(n-1) S bytes in total; a good one lets all ranks send as much
(`bounds`, `volume`). Explained in chapter 03.
"""

from __future__ import annotations

from dataclasses import dataclass

from ddp_course.launch import Links
from ddp_course.theory.checks import (
    check_count,
    check_not_negative,
    check_world,
    log2_up,
    power_below,
)
from ddp_course.theory.costs import (
    Cost,
    all_gather,
    broadcast_naive,
    broadcast_tree,
    reduce_naive,
    reduce_scatter,
    reduce_tree,
)


def all_reduce_naive(world_size: int, nbytes: float) -> Cost:
    """All to rank 0, which adds, and back to all: 2(n-1)(alpha + S beta).

    One after the other, both ways: `reduce_naive`, then `broadcast_naive`. Chapter 03.
    """
    return reduce_naive(world_size, nbytes) + broadcast_naive(world_size, nbytes)


def all_reduce_tree(world_size: int, nbytes: float) -> Cost:
    """Up a binomial tree and down again: 2 ceil(log2 n)(alpha + S beta).

    `reduce_tree`, then `broadcast_tree` (Thakur et al. 2005). Chapter 03.
    """
    return reduce_tree(world_size, nbytes) + broadcast_tree(world_size, nbytes)


def all_reduce_double_tree(world_size: int, nbytes: float) -> Cost:
    """Up and down two trees, in many small pieces: 2 ceil(log2 n) alpha + 2 S beta.

    Each tree carries half of the tensor, and a rank that is a leaf of one is inside the
    other, so that every rank sends and receives all the time. (Two ranks send S/2 up
    one tree and S/2 down the other: 2 alpha + S beta.) The limit of pieces so
    small that filling the trees takes no time, and so many that it is a limit only:
    their latencies are not counted (Sanders, Speck & Traeff 2009; NCCL since 2.4).
    Chapter 03.
    """
    check_world(world_size, nbytes)
    if world_size == 1:
        return Cost(0, 0 * nbytes, 0 * nbytes)
    share = nbytes / 2 if world_size == 2 else nbytes
    return Cost(2 * log2_up(world_size), 2 * share, share)


def all_reduce_halving_doubling(world_size: int, nbytes: float) -> Cost:
    """Swap halves, then quarters, ..., and back: 2 log2(n) alpha + 2(n-1)/n S beta.

    For n = 2^k (Rabenseifner's algorithm, Thakur et al. 2005). For another
    n, with p the largest power of two below: each of the ranks p to n-1 first adds its
    tensor into that of rank r-p and at the end gets the result from there. That is two
    messages, 2 S bytes and S added more than for p. Chapter 03.
    """
    check_world(world_size, nbytes)
    p = power_below(world_size)
    part = (p - 1) * nbytes / p
    cost = Cost(2 * log2_up(p), 2 * part, part)
    return cost if p == world_size else cost + Cost(2, 2 * nbytes, nbytes)


def all_reduce_ring(world_size: int, nbytes: float) -> Cost:
    """Around the ring twice, S/n a step: 2(n-1) alpha + 2(n-1)/n S beta.

    `reduce_scatter`, then `all_gather`; no algorithm sends fewer bytes (Patarasu & Yuan
    2009). Chapter 03.
    """
    return reduce_scatter(world_size, nbytes) + all_gather(world_size, nbytes)


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
    if variant == "leader":
        return HierarchicalCost(
            inside=all_reduce_tree(nproc_per_node, nbytes),
            between=all_reduce_ring(nnodes, nbytes),
        )
    if variant == "sharded":
        return HierarchicalCost(
            inside=all_reduce_ring(nproc_per_node, nbytes),
            between=all_reduce_ring(nnodes, nbytes / nproc_per_node),
        )
    raise ValueError(f"variant is {variant!r}; it can be 'leader' or 'sharded'")
