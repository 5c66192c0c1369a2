"""All-reduce by halving and doubling: a ring's bytes in a tree's number of steps.

A reduce-scatter in which the messages are halved each time, then an all-gather in which
they are doubled (Thakur, Rabenseifner and Gropp 2005). Between ranks far apart, though:
on a cluster whose links get slower with distance, a ring may be better. `by_halves` is
all of it; `all_reduce` does the same by a plan (as in `ring`). Chapter 03.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import plan as plans
from ddp_course.collectives.call import all_reduce_by
from ddp_course.collectives.plan import Plan, Transfer, among, bounds, make_plan
from ddp_course.collectives.port import Port


def by_halves(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up all ranks' `tensor` (contiguous), in place; called by all ranks.

    Ranks beyond a power of two give all they have to a partner, and get the result.
    """
    port, flat = Port(group), tensor.view(-1)
    p = 1 << (port.size.bit_length() - 1)  # the largest power of two
    if port.rank >= p:
        port.send(flat, port.rank - p).wait()
        port.receive(flat, port.rank - p).wait()
        return
    has_partner = port.rank + p < port.size
    if has_partner:
        arrived = torch.empty_like(flat)
        port.receive(arrived, port.rank + p).wait()
        flat += arrived
    halve_and_double(flat, bounds(flat.numel(), p), port)
    if has_partner:
        port.send(flat, port.rank + p).wait()


def halve_and_double(flat: Tensor, edges: Sequence[int], port: Port) -> None:
    """Swap halves with a partner, add, do so with the half that is kept; and all back.

    `edges` are where the chunks begin and end that this rank still adds up.
    """
    distance = (len(edges) - 1) // 2
    if distance == 0:
        return
    partner = port.rank ^ distance
    kept, given = edges[: distance + 1], edges[distance:]
    if port.rank & distance:
        kept, given = given, kept
    mine, theirs = flat[kept[0] : kept[-1]], flat[given[0] : given[-1]]
    arrived = torch.empty_like(mine)
    port.exchange([(theirs, partner)], [(arrived, partner)])
    mine += arrived
    halve_and_double(flat, kept, port)
    port.exchange([(mine, partner)], [(theirs, partner)])


@cache
def halving_plan(world_size: int) -> Plan:
    """Reduce-scatter: partners swap halves of what they are still responsible for.

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
def plan(world_size: int) -> Plan:
    """Halve, then double: the same messages back. Others take part through a partner.

    With p = 2^k the largest power of two up to N, rank p + i first gives all it has to
    rank i, and at the end gets the result back: two steps more, of S bytes each.
    """
    p = 1 << (world_size.bit_length() - 1)
    extra = range(world_size - p)
    halving = halving_plan(p)
    doubling = plans.backwards(halving, "doubling", reduce=False)
    phases = [
        [Transfer(0, p + i, i, 0, p, True) for i in extra],
        among(halving, range(p)),
        among(doubling, range(p)),
        [Transfer(0, i, p + i, 0, p, False) for i in extra],
    ]
    parts = [make_plan("part", world_size, p, phase) for phase in phases]
    return plans.chain("all_reduce, halving-doubling", *parts)


all_reduce = partial(all_reduce_by, "halving_doubling", plan)
