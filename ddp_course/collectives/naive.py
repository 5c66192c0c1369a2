"""All-reduce, the naive way: everything through rank 0, which adds.

Rank 0 receives and sends (N - 1) S bytes while the others wait, so the time grows with
the number of ranks. `through_rank_0` is all of it; `all_reduce` does the same by a plan
(as in `ring`). Explained in chapter 03.
"""

from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.call import all_reduce_by
from ddp_course.collectives.plan import Plan, chain
from ddp_course.collectives.port import Port
from ddp_course.collectives.rooted import broadcast_naive_plan, reduce_naive_plan


def through_rank_0(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up all ranks' `tensor` (contiguous), in place; called by all ranks."""
    port = Port(group)
    if port.rank != 0:
        port.send(tensor, 0).wait()
        port.receive(tensor, 0).wait()
        return
    arrived = torch.empty_like(tensor)
    for peer in range(1, port.size):
        port.receive(arrived, peer).wait()
        tensor += arrived
    for peer in range(1, port.size):
        port.send(tensor, peer).wait()


@cache
def plan(world_size: int) -> Plan:
    """Rank 0 receives from one rank after the other, then sends to one after the other.

    2 (N - 1) steps; rank 0 sends (N - 1) S bytes, each of the others S.
    """
    gathered = reduce_naive_plan(world_size)
    return chain("all_reduce, naive", gathered, broadcast_naive_plan(world_size))


all_reduce = partial(all_reduce_by, "naive", plan)
