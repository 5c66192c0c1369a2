"""All-reduce, the naive way: gather at rank 0, which adds, and broadcast.

Everything goes through rank 0: it receives and sends (N - 1) S bytes while the others
wait, so the time grows with the number of ranks. Explained in chapter 03.
"""

from __future__ import annotations

from functools import cache

from ddp_course.collectives.common import planned
from ddp_course.collectives.plan import Plan, chain
from ddp_course.collectives.rooted import broadcast_naive_plan, reduce_naive_plan


@cache
def plan(world_size: int) -> Plan:
    """Rank 0 receives from one rank after the other, then sends to one after the other.

    2 (N - 1) steps; rank 0 sends (N - 1) S bytes, each of the others S.
    """
    gathered = reduce_naive_plan(world_size)
    return chain("all_reduce, naive", gathered, broadcast_naive_plan(world_size))


all_reduce = planned("naive", plan)
