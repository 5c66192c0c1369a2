"""All-reduce by halving and doubling: a ring's bytes in a tree's number of steps.

A reduce-scatter in which the messages are halved in each step, then an all-gather in
which they are doubled (Thakur, Rabenseifner and Gropp 2005). The largest messages go
between the ranks farthest apart: on a cluster whose links get slower with distance, a
ring may be better. Explained in chapter 03.
"""

from functools import cache

from ddp_course.collectives.plan import (
    Plan,
    Transfer,
    among,
    backwards,
    chain,
    make_plan,
)


@cache
def halving_plan(world_size: int) -> Plan:
    """Plan a reduce-scatter: partners swap halves of the chunks that both still have.

    In each step rank r and the rank at `distance` (..., 4, 2, 1) have the same range of
    chunks; one of them keeps the lower half, the other the upper. `world_size` must be
    a power of two. log2(N) steps.
    """
    transfers, distance, step = [], world_size // 2, 0
    while distance:
        for r in range(world_size):
            partner = r ^ distance
            first = partner & ~(distance - 1)  # the half that the partner keeps
            transfers.append(Transfer(step, r, partner, first, first + distance, True))
        distance, step = distance // 2, step + 1
    end = [{r} for r in range(world_size)]
    return make_plan("halving", world_size, world_size, transfers, end=end)


@cache
def halving_doubling_plan(world_size: int) -> Plan:
    """Plan an all-reduce: halving, then doubling, which sends the same messages back.

    p is the largest power of two up to N. Rank p + i first sends its whole tensor to
    rank i, and at the end receives the result: two more steps, with whole tensors.
    """
    p = 1 << (world_size.bit_length() - 1)
    extra = range(world_size - p)
    halving = halving_plan(p)
    doubling = backwards(halving, "doubling", reduce=False)
    phases = [
        [Transfer(0, p + i, i, 0, p, True) for i in extra],
        among(halving, range(p)),
        among(doubling, range(p)),
        [Transfer(0, i, p + i, 0, p, False) for i in extra],
    ]
    parts = [make_plan("part", world_size, p, phase) for phase in phases]
    return chain("all_reduce, halving-doubling", *parts)
