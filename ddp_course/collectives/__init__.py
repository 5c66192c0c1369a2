"""Floor 1: the collectives, built on send and recv. Read the modules in this order:

    plan              which rank sends which chunks to which rank, step by step
    catalog           every plan of the course: pure functions
    naive, tree, ring
                      three all-reduces as functions over send and recv
    halving_doubling, hierarchical
                      two more, as plans
    runtime           execute a plan on real ranks
    call, meeting, communicator
                      check a call and compare it between the ranks, before any message
    by_plan           the all-reduces that check the call and execute a plan
    rooted            broadcast, reduce, scatter, gather: one rank is special
    unrooted          all-gather, reduce-scatter, all-to-all, barrier
    one_machine       the quick way to compare calls; `meeting` is handed it below
    shared_memory     a sixth all-reduce, for the ranks of one machine
    algorithms        the six by name, and `all_reduce`, which chooses
    staging, memory_barrier, allocator
                      how ranks share memory: from the algorithm downwards
    endpoint, patience, reduction
                      helpers of the modules above

The functions have the names and arguments of `torch.distributed`. Chapters 02 and 03.
"""

from ddp_course.collectives import one_machine
from ddp_course.collectives.algorithms import ALGORITHMS, all_reduce
from ddp_course.collectives.by_plan import (
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
    naive_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from ddp_course.collectives.communicator import Work, communicator
from ddp_course.collectives.meeting import (
    BARRIER_FINDERS,
    CollectiveError,
    meeting,
    quick_exchange,
)
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

BARRIER_FINDERS.append(one_machine.find_barrier)
