"""What all all-reduces have in common.

The algorithms are in `naive`, `tree`, `halving_doubling`, `ring`, `hierarchical` and
`shared_memory`. Explained in chapter 03.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.call import Call, Run
from ddp_course.collectives.communicator import Work, communicator
from ddp_course.collectives.plan import Plan
from ddp_course.collectives.reduction import ReduceOp
from ddp_course.collectives.runtime import Buffer


def planned(name: str, plan: Callable[[int], Plan]) -> Callable[..., Work | None]:
    """Return the all-reduce that carries out `plan(world_size)`; `name` is its module.

    An algorithm is a plan, and nothing else: what is checked, sent and added, and how,
    is the same for all of them.
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
    call = communicator(group).call(f"{name}.all_reduce")
    return start_all_reduce(call, plan, tensor, op, async_op)


def start_all_reduce(
    call: Call,
    plan: Callable[[int], Plan],
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType,
    async_op: bool,
) -> Work | None:
    """Check the arguments and start; for `all_reduce_by` and its kin."""
    call.tensor("tensor", tensor)
    call.reduction(op, tensor)

    def body(run: Run) -> None:
        chosen = plan(call.comm.size)
        run.plan(chosen, Buffer.flat(tensor, chosen.chunks))

    return call.start(body, async_op)
