"""What all all-reduces have in common: an algorithm is a plan, and nothing else.

What is checked, sent and added, and how, is the same for all of them. The plans are in
`naive`, `tree`, `halving_doubling`, `ring` and `hierarchical`. Explained in chapter 03.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.call import Call
from ddp_course.collectives.communicator import Work, communicator
from ddp_course.collectives.plan import Plan
from ddp_course.collectives.reduction import ReduceOp


def all_reduce_by(
    name: str,
    plan: Callable[[int], Plan],
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine `tensor` of all ranks, in place, by the plan `plan(world_size)`.

    `tensor` is contiguous, of any shape and type; `op` is SUM, AVG, MAX, MIN or
    PRODUCT; `group` is a process group, by default all ranks. Afterwards all ranks have
    the same bits. With `async_op` it returns at once, with a handle to wait for.

    Raises CollectiveError, on every rank and before anything is sent, if a tensor or op
    is unusable or differs between ranks; ValueError or TypeError for a wrong group.
    """
    call = Call(communicator(group), f"{name}.all_reduce")
    return call.all_reduce(plan, tensor, op, async_op)


def planned(name: str, plan: Callable[[int], Plan]) -> Callable[..., Work | None]:
    """Return the all-reduce that carries out `plan(world_size)`; `name` is its module.

    It is `all_reduce_by` with the first two arguments given.
    """

    def all_reduce(
        tensor: Tensor,
        op: dist.ReduceOp.RedOpType = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Combine all ranks' `tensor` (any shape, in place), by this module's `plan`.

        See `common.all_reduce_by` for arguments and errors. Chapter 03.
        """
        return all_reduce_by(name, plan, tensor, op, group, async_op)

    all_reduce.__module__, all_reduce.__qualname__ = plan.__module__, "all_reduce"
    return all_reduce
