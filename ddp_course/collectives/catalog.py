"""Every plan of the course by its name, for figures, widgets and tests."""

from collections.abc import Callable

from ddp_course.collectives import halving_doubling, naive, ring, rooted, tree, unrooted
from ddp_course.collectives.plan import Plan

PLANS: dict[str, Callable[[int], Plan]] = {
    "broadcast, naive": rooted.broadcast_naive_plan,
    "broadcast, tree": rooted.broadcast_tree_plan,
    "scatter": rooted.scatter_plan,
    "gather": rooted.gather_plan,
    "reduce, naive": rooted.reduce_naive_plan,
    "reduce, tree": rooted.reduce_tree_plan,
    "all_gather, ring": unrooted.all_gather_ring_plan,
    "reduce_scatter, ring": unrooted.reduce_scatter_ring_plan,
    "reduce_scatter, direct": unrooted.reduce_scatter_direct_plan,
    "all_to_all": unrooted.all_to_all_plan,
    "barrier": unrooted.barrier_plan,
    "all_reduce, naive": naive.plan,
    "all_reduce, tree": tree.plan,
    "all_reduce, halving-doubling": halving_doubling.plan,
    "all_reduce, ring": ring.plan,
}
