"""All-reduce along a tree: reduce up, broadcast down, half as many ranks at each level.

2 log2(N) steps instead of 2 (N - 1), but still whole tensors, of which rank 0 moves
the most. Good for small tensors. Explained in chapter 03.
"""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.common import all_reduce_by
from ddp_course.collectives.communicator import Work
from ddp_course.collectives.plan import Plan, chain
from ddp_course.collectives.reduction import ReduceOp
from ddp_course.collectives.rooted import broadcast_tree_plan, reduce_tree_plan


@cache
def plan(world_size: int) -> Plan:
    """A binomial tree up to rank 0, and down again: 2 ceil(log2(N)) steps."""
    up = reduce_tree_plan(world_size)
    return chain("all_reduce, tree", up, broadcast_tree_plan(world_size))


def all_reduce(
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine all ranks' `tensor` (any shape, in place) along a binomial tree.

    See `common.all_reduce_by` for arguments and errors. Chapter 03.
    """
    return all_reduce_by("tree", plan, tensor, op, group, async_op)
