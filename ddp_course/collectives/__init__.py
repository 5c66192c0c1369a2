"""Floor 1: the collectives, made of send and recv. Read the modules in this order:

    plan              who sends which slice to whom in which step: plain data
    runtime           carry out a plan on real ranks
    rooted            broadcast, reduce, scatter, gather: one rank is special
    unrooted          all-gather, reduce-scatter, all-to-all, barrier
    naive, tree, ring, halving_doubling, hierarchical
                      five ways to all-reduce: each as a function over `port` that is
                      read first, as a plan, and as the `all_reduce` that carries it out
    shared_memory     a sixth, for the ranks of one machine
    choose            the fastest of them for a size: `all_reduce`
    call, communicator
                      what every call does first: do all ranks mean the same?
    staging, memory_barrier, allocator
                      how ranks share memory: from the algorithm downwards
    port, patience, reduction, catalog
                      the tools of the above

The functions have the names and arguments of `torch.distributed`. Chapters 02 and 03.
"""

from ddp_course.collectives.choose import ALGORITHMS, Selector, all_reduce
from ddp_course.collectives.communicator import CollectiveError, Work, communicator
from ddp_course.collectives.reduction import ReduceOp
from ddp_course.collectives.rooted import broadcast, gather, reduce, scatter
from ddp_course.collectives.unrooted import (
    all_gather,
    all_gather_single,
    all_to_all_single,
    barrier,
    reduce_scatter,
    reduce_scatter_single,
)
