"""The naive all-reduce: all ranks send to rank 0, which adds and sends the sum back.

Rank 0 receives and sends (N - 1) S bytes while the others wait, so the time grows with
the number of ranks. `by_plan.naive_all_reduce` sends the same messages and checks the
call first. Explained in chapter 03.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def through_rank_0(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up all ranks' `tensor` (contiguous), in place; called by all ranks."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    if rank != 0:
        dist.send(tensor, group_dst=0, group=group)
        dist.recv(tensor, group_src=0, group=group)
        return
    arrived = torch.empty_like(tensor)
    for peer in range(1, n):
        dist.recv(arrived, group_src=peer, group=group)
        tensor += arrived
    for peer in range(1, n):
        dist.send(tensor, group_dst=peer, group=group)
