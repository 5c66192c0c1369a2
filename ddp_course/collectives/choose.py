"""The choice of an algorithm: which all-reduce, for how many bytes, on which ranks?

No algorithm is the fastest for all sizes. Small tensors want few steps, large ones few
bytes, ranks of one node want shared memory, and slow links between nodes want to be
spared. `all_reduce` chooses by a rule; `Selector` chooses by what was measured on your
machine. Explained in chapter 03.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from ddp_course.collectives import (
    halving_doubling,
    hierarchical,
    naive,
    ring,
    shared_memory,
    tree,
)
from ddp_course.collectives.call import Collective
from ddp_course.collectives.communicator import Communicator, Group, Work, communicator
from ddp_course.collectives.reduction import Op, ReduceOp

ALGORITHMS: dict[str, Callable[..., Work | None]] = {
    "naive": naive.all_reduce,
    "tree": tree.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "ring": ring.all_reduce,
    "hierarchical": hierarchical.all_reduce,
    "shared_memory": shared_memory.all_reduce,
}
SMALL = 64 << 10  # bytes up to which the number of steps matters most


def all_reduce(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    *,
    algorithm: str = "auto",
) -> Work | None:
    """Combine all ranks' `tensor` (any shape, in place) by the algorithm that suits.

    `algorithm` is "auto" or one of `ALGORITHMS`; see `rule`. For the other arguments
    and the errors see `call.all_reduce_by`. Chapter 03.
    """
    comm = communicator(group)
    if algorithm == "auto":
        # Something that is no tensor is for the call's own check, on all ranks alike.
        if isinstance(tensor, Tensor):
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


@dataclass(frozen=True)
class Selector:
    """Chooses what was fastest: `best` is (size in bytes, name), in order of size.

    A size in between is served by the next larger one that was measured.
    """

    best: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, seconds: Mapping[str, Mapping[int, float]]) -> Self:
        """Make a selector of measured times: name -> size in bytes -> seconds.

        Only sizes that were measured for every name count. Raises ValueError if there
        are none.
        """
        common = set.intersection(*(set(times) for times in seconds.values()))
        if not common:
            raise ValueError("no size was measured for all of them")
        names = {size: min(seconds, key=lambda n: seconds[n][size]) for size in common}
        return cls(tuple(sorted(names.items())))

    def __call__(self, nbytes: int) -> str:
        """Return the name of the fastest for `nbytes` bytes."""
        sizes = [size for size, _ in self.best]
        return self.best[min(bisect_left(sizes, nbytes), len(sizes) - 1)][1]
