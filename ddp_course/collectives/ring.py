"""All-reduce around a ring: everyone sends to the right, nobody is special.

A reduce-scatter, then an all-gather (Patarasu and Yuan 2009; made popular for deep
learning by Gibiansky 2017). Each rank sends 2 (N - 1) / N S bytes, and no all-reduce
can do with less. The price is the number of steps, 2 (N - 1). Explained in chapter 03.
"""

from __future__ import annotations

from functools import cache

from ddp_course.collectives.common import planned
from ddp_course.collectives.plan import Plan, chain
from ddp_course.collectives.shards import all_gather_ring_plan, reduce_scatter_ring_plan


@cache
def plan(world_size: int) -> Plan:
    """First every rank gets the whole sum of one chunk, then everyone gets them all."""
    sums = reduce_scatter_ring_plan(world_size)
    return chain("all_reduce, ring", sums, all_gather_ring_plan(world_size))


all_reduce = planned("ring", plan)
