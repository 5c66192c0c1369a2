"""The all-reduces that execute a plan, with everything that a library needs.

All ranks compare their calls (`call`), then each sends the messages of its plan
(`catalog`), long chunks in pieces (`runtime`). With `async_op=True` the rank can
compute meanwhile. `naive`, `tree` and `ring` are three of these algorithms without
checks, pieces and threads. Explained in chapter 03.
"""

from functools import partial

from torch import Tensor

from ddp_course.collectives import halving_doubling
from ddp_course.collectives.call import Collective, all_reduce_by
from ddp_course.collectives.catalog import naive_plan, ring_plan, tree_plan
from ddp_course.collectives.communicator import Group, Work
from ddp_course.collectives.hierarchical import PLANS, regular
from ddp_course.collectives.reduction import Op, ReduceOp

naive_all_reduce = partial(all_reduce_by, "naive_all_reduce", naive_plan)
tree_all_reduce = partial(all_reduce_by, "tree_all_reduce", tree_plan)
ring_all_reduce = partial(all_reduce_by, "ring_all_reduce", ring_plan)
halving_doubling_all_reduce = partial(
    all_reduce_by, "halving_doubling_all_reduce", halving_doubling.halving_doubling_plan
)


def hierarchical_all_reduce(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    variant: str = "sharded",
) -> Work | None:
    """Reduce all ranks' `tensor` (any shape, in place), sparing links between nodes.

    Every node must have equally many ranks of the group, numbered node by node.
    `variant` is "sharded" or "leader". See `call.all_reduce_by` for the other
    arguments and errors. Chapter 03.
    """
    call = Collective(group, "hierarchical_all_reduce", variant=variant)
    nodes = call.comm.nodes
    call.choice("variant", variant, PLANS)
    if not regular(nodes):
        call.refuse(f"the group's nodes have the ranks {nodes}; they need equally many")
    plan = lambda _: PLANS[variant](len(nodes), len(nodes[0]))  # noqa: E731
    return call.all_reduce(plan, tensor, op, async_op)
