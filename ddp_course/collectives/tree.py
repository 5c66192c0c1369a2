"""All-reduce along a tree: reduce up, broadcast down, half as many ranks at each level.

2 log2(N) steps instead of 2 (N - 1), but still whole tensors, and some ranks send
log2(N) of them, others one. Good for small tensors. Explained in chapter 03.
"""

from __future__ import annotations

from functools import cache

from ddp_course.collectives.common import planned
from ddp_course.collectives.plan import Plan, chain
from ddp_course.collectives.rooted import broadcast_tree_plan, reduce_tree_plan


@cache
def plan(world_size: int) -> Plan:
    """A binomial tree up to rank 0, and down again: 2 ceil(log2(N)) steps."""
    up = reduce_tree_plan(world_size)
    return chain("all_reduce, tree", up, broadcast_tree_plan(world_size))


all_reduce = planned("tree", plan)
