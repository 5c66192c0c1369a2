"""All all-reduces by name, and a rule that chooses one by size and group.

No algorithm is the fastest for all sizes. Small tensors need few steps, large ones few
bytes; ranks of one node can use shared memory; slow links between nodes should carry
little. Explained in chapter 03.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ddp_course.collectives import by_plan, hierarchical, shared_memory
from ddp_course.collectives.call import Collective
from ddp_course.collectives.communicator import Communicator, Group, Work, communicator
from ddp_course.collectives.reduction import Op, ReduceOp

ALGORITHMS: dict[str, Callable[..., Work | None]] = {
    "naive": by_plan.naive_all_reduce,
    "tree": by_plan.tree_all_reduce,
    "halving_doubling": by_plan.halving_doubling_all_reduce,
    "ring": by_plan.ring_all_reduce,
    "hierarchical": by_plan.hierarchical_all_reduce,
    "shared_memory": shared_memory.all_reduce,
}
SMALL = 64 << 10  # bytes; up to this size the number of steps matters most


def all_reduce(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Work | None:
    """Reduce all ranks' `tensor` (any shape, in place).

    `algorithm` is "auto" (see `rule`) or one of `ALGORITHMS`. For the other arguments
    and the errors see `call.all_reduce_by`. Chapter 03.
    """
    comm = communicator(group)
    if algorithm == "auto":
        # The call itself refuses other types and sparse tensors, on all ranks.
        if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
            algorithm = rule(comm, tensor.nbytes, tensor.device.type == "cpu")
        else:
            algorithm = rule(comm, 0)
    elif algorithm not in ALGORITHMS:
        call = Collective(group, "all_reduce")
        call.choice("algorithm", algorithm, ["auto", *ALGORITHMS])
        return call.start()  # raises on every rank
    return ALGORITHMS[algorithm](tensor, op, group, async_op)


def rule(comm: Communicator, nbytes: int, cpu: bool = True) -> str:
    """Return the algorithm for `nbytes` bytes among the ranks of `comm`.

    Shared memory inside one node, for tensors on the CPU; a hierarchy for equally large
    nodes; otherwise a tree for small tensors and a ring for others.
    """
    nodes = comm.nodes
    if len(nodes) == 1 and cpu and comm.shares_memory:
        return "shared_memory"
    if hierarchical.regular(nodes) and len(nodes) > 1 and len(nodes[0]) > 1:
        return "hierarchical"
    return "tree" if nbytes <= SMALL else "ring"
