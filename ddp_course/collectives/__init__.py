"""Floor 1: the collectives, made of send and recv. Read the modules in this order:

    plan              who sends which slice to whom in which step: plain data
    runtime           carry out a plan on real ranks
    rooted            broadcast, reduce, scatter, gather: one rank is special
    shards            all-gather, reduce-scatter
    exchange          all-to-all, barrier
    naive, tree, halving_doubling, ring, hierarchical, shared_memory
                      six ways to all-reduce, each with an `all_reduce` of its own;
                      the first, the second and `ring` also as it is read first:
                      `through_rank_0`, `along_a_tree`, `around_the_ring` (over `port`)
    choose            the fastest of them for a size: `all_reduce`
    call, agreement   what every call does first: do all ranks mean the same?
    staging, memory_barrier, allocator
                      how ranks share memory: from the algorithm downwards
    communicator, port, patience, reduction, catalog
                      the tools of the above

The functions have the names and arguments of `torch.distributed`. Chapters 02 and 03.
"""

from ddp_course.collectives.agreement import CollectiveError
from ddp_course.collectives.choose import ALGORITHMS, Selector, all_reduce
from ddp_course.collectives.communicator import Work, communicator
from ddp_course.collectives.exchange import all_to_all, all_to_all_single, barrier
from ddp_course.collectives.reduction import ReduceOp
from ddp_course.collectives.rooted import broadcast, gather, reduce, scatter
from ddp_course.collectives.shards import (
    all_gather,
    all_gather_single,
    reduce_scatter,
    reduce_scatter_single,
)

__all__ = [
    "ALGORITHMS",
    "CollectiveError",
    "ReduceOp",
    "Selector",
    "Work",
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "communicator",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "scatter",
]
