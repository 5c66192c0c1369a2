"""Floor 0: what it must cost, as closed forms. Nothing is sent, nothing is measured.

`theory.all_reduce_ring(4, 2**20).over(link)` is the time in seconds that four ranks
need to all-reduce 1 MiB in a ring of such links. Read the modules in this order:

    costs       messages and bytes one after the other, for each collective (chapter 02)
    all_reduce  the same for each all-reduce algorithm (chapter 03)
    volume      how many bytes each rank sends, exactly (chapters 02 and 03)
    bounds      what no algorithm can beat; bus bandwidth; ring or tree (chapter 03)
    fit         from measured times back to alpha and beta (chapter 02)
    checks: what the formulas ask of their arguments
"""

from ddp_course.theory.all_reduce import (
    HierarchicalCost,
    all_reduce_double_tree,
    all_reduce_halving_doubling,
    all_reduce_hierarchical,
    all_reduce_naive,
    all_reduce_ring,
    all_reduce_tree,
)
from ddp_course.theory.bounds import (
    bus_bandwidth,
    bus_factor,
    crossover,
    least_bytes,
    least_messages,
    least_seconds,
)
from ddp_course.theory.costs import (
    Cost,
    all_gather,
    all_to_all,
    barrier,
    broadcast_naive,
    broadcast_tree,
    gather,
    reduce_naive,
    reduce_scatter,
    reduce_tree,
    scatter,
    send,
)
from ddp_course.theory.fit import Fit, fit
from ddp_course.theory.volume import (
    HierarchicalBytes,
    SharedMemoryBytes,
    bytes_sent,
    children,
    hierarchical_bytes_sent,
    shared_memory_bytes,
)

__all__ = [
    "Cost",
    "Fit",
    "HierarchicalBytes",
    "HierarchicalCost",
    "SharedMemoryBytes",
    "all_gather",
    "all_reduce_double_tree",
    "all_reduce_halving_doubling",
    "all_reduce_hierarchical",
    "all_reduce_naive",
    "all_reduce_ring",
    "all_reduce_tree",
    "all_to_all",
    "barrier",
    "broadcast_naive",
    "broadcast_tree",
    "bus_bandwidth",
    "bus_factor",
    "bytes_sent",
    "children",
    "crossover",
    "fit",
    "gather",
    "hierarchical_bytes_sent",
    "least_bytes",
    "least_messages",
    "least_seconds",
    "reduce_naive",
    "reduce_scatter",
    "reduce_tree",
    "scatter",
    "send",
    "shared_memory_bytes",
]
