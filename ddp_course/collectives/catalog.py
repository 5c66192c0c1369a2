"""Every plan of the course: pure functions from a world size to a `Plan`.

Read `plan` first. Two all-reduces have files of their own, `halving_doubling` and
`hierarchical`. `PLANS` names the plans that depend on the number of ranks alone, for
figures, widgets and tests. Explained in chapters 02 and 03.
"""

from collections.abc import Callable
from functools import cache

from ddp_course.collectives import halving_doubling
from ddp_course.collectives.plan import Plan, Transfer, backwards, chain, make_plan

# ---- with a root ---------------------------------------------------------------------


@cache
def broadcast_naive_plan(world_size: int, root: int = 0) -> Plan:
    """Plan a broadcast: rank `root` sends to one rank after the other.

    In step k it sends to the k-th of the others: world_size - 1 steps.
    """
    others = [(root + k) % world_size for k in range(1, world_size)]
    transfers = [Transfer(k, root, dst, 0, 1, False) for k, dst in enumerate(others)]
    return _broadcast(root, "broadcast, naive", world_size, transfers)


@cache
def broadcast_tree_plan(world_size: int, root: int = 0) -> Plan:
    """Plan a broadcast: every rank that has the data sends it on in each step.

    A binomial tree, ceil(log2(world_size)) steps: counted from the root, rank r sends
    to rank r + d, for d = ..., 4, 2, 1 (Thakur et al. 2005).
    """
    steps, transfers = (world_size - 1).bit_length(), []
    for step in range(steps):
        distance = 2 ** (steps - 1 - step)
        for r in range(0, world_size - distance, 2 * distance):
            src, dst = (r + root) % world_size, (r + distance + root) % world_size
            transfers.append(Transfer(step, src, dst, 0, 1, False))
    return _broadcast(root, "broadcast, tree", world_size, transfers)


def _broadcast(
    root: int, name: str, world_size: int, transfers: list[Transfer]
) -> Plan:
    start = [{0} if rank == root else () for rank in range(world_size)]
    return make_plan(name, world_size, 1, transfers, start)


@cache
def reduce_naive_plan(world_size: int, root: int = 0) -> Plan:
    """Plan a reduce: rank `root` receives from one rank after the other, and adds."""
    broadcast = broadcast_naive_plan(world_size, root)
    return backwards(broadcast, "reduce, naive", reduce=True)


@cache
def reduce_tree_plan(world_size: int, root: int = 0) -> Plan:
    """Plan a reduce: in each step half of the ranks with partial sums send them on.

    ceil(log2(world_size)) steps along a binomial tree.
    """
    broadcast = broadcast_tree_plan(world_size, root)
    return backwards(broadcast, "reduce, tree", reduce=True)


@cache
def scatter_plan(world_size: int, root: int = 0) -> Plan:
    """Plan a scatter: rank `root` sends chunk r to rank r, one after the other."""
    n = world_size
    others = [(root + k) % n for k in range(1, n)]
    transfers = [Transfer(k, root, r, r, r + 1, False) for k, r in enumerate(others)]
    start = [range(n) if r == root else () for r in range(n)]
    return make_plan("scatter", n, n, transfers, start, end=[{r} for r in range(n)])


@cache
def gather_plan(world_size: int, root: int = 0) -> Plan:
    """Plan a gather: rank r sends chunk r to `root`, one after the other."""
    return backwards(scatter_plan(world_size, root), "gather", reduce=False)


# ---- without a root ------------------------------------------------------------------


def _shards(n: int) -> list[set[int]]:
    """Return the chunks of each rank before an all-gather: chunk r on rank r."""
    return [{r} for r in range(n)]


@cache
def all_gather_ring_plan(world_size: int) -> Plan:
    """Plan an all-gather: every rank sends to its right what came from its left.

    In step k rank r sends chunk r - k to rank r + 1: world_size - 1 steps.
    """
    n = world_size
    transfers = [
        Transfer(k, r, (r + 1) % n, (r - k) % n, (r - k) % n + 1, False)
        for k in range(n - 1)
        for r in range(n)
    ]
    return make_plan("all_gather, ring", n, n, transfers, start=_shards(n))


@cache
def reduce_scatter_ring_plan(world_size: int) -> Plan:
    """Plan a reduce-scatter: every rank adds to a sum and sends it to its right.

    In step k rank r sends chunk r - 1 - k to rank r + 1, which adds its own. The sum of
    chunk c starts at rank c + 1 and ends, complete, at rank c.
    """
    n = world_size
    transfers = [
        Transfer(k, r, (r + 1) % n, (r - 1 - k) % n, (r - 1 - k) % n + 1, True)
        for k in range(n - 1)
        for r in range(n)
    ]
    return make_plan("reduce_scatter, ring", n, n, transfers, end=_shards(n))


@cache
def reduce_scatter_direct_plan(world_size: int) -> Plan:
    """Plan a reduce-scatter: every rank sends each peer the peer's chunk, and adds.

    It sends as many bytes as the ring does, but no message waits for another.
    """
    n = world_size
    transfers = [
        Transfer(k - 1, r, (r + k) % n, (r + k) % n, (r + k) % n + 1, True)
        for k in range(1, n)
        for r in range(n)
    ]
    return make_plan("reduce_scatter, direct", n, n, transfers, end=_shards(n))


@cache
def all_to_all_plan(world_size: int) -> Plan:
    """Plan an all-to-all: in step k rank r sends to rank r + k.

    Chunk i * n + j goes from rank i to rank j: world_size - 1 steps.
    """
    n = world_size
    transfers = [
        Transfer(k - 1, i, j, i * n + j, i * n + j + 1, False)
        for k in range(1, n)
        for i in range(n)
        for j in [(i + k) % n]
    ]
    start = [range(i * n, i * n + n) for i in range(n)]
    end = [range(j, n * n, n) for j in range(n)]
    return make_plan("all_to_all", n, n * n, transfers, start, end)


@cache
def barrier_plan(world_size: int) -> Plan:
    """Plan a barrier: in step k rank r sends rank r + 2^k the list of arrived ranks.

    After ceil(log2(world_size)) steps every rank knows that all have arrived
    (dissemination barrier: Hensgen, Finkel and Manber 1988). A rank may be in the list
    twice.
    """
    n = world_size
    transfers = [
        Transfer(k, r, (r + 2**k) % n, 0, 1, True)
        for k in range((n - 1).bit_length())
        for r in range(n)
    ]
    return make_plan("barrier", n, 1, transfers, idempotent=True)


# ---- all-reduces ---------------------------------------------------------------------


@cache
def naive_plan(world_size: int) -> Plan:
    """Plan an all-reduce: rank 0 receives from all, one by one, then sends to all.

    2 (N - 1) steps; for S bytes, rank 0 sends (N - 1) S, every other rank S.
    """
    up, down = reduce_naive_plan(world_size), broadcast_naive_plan(world_size)
    return chain("all_reduce, naive", up, down)


@cache
def tree_plan(world_size: int) -> Plan:
    """Plan an all-reduce: up a binomial tree and down again, 2 ceil(log2(N)) steps."""
    up, down = reduce_tree_plan(world_size), broadcast_tree_plan(world_size)
    return chain("all_reduce, tree", up, down)


@cache
def ring_plan(world_size: int) -> Plan:
    """Plan an all-reduce around a ring: a reduce-scatter, then an all-gather."""
    sums = reduce_scatter_ring_plan(world_size)
    return chain("all_reduce, ring", sums, all_gather_ring_plan(world_size))


PLANS: dict[str, Callable[[int], Plan]] = {
    "broadcast, naive": broadcast_naive_plan,
    "broadcast, tree": broadcast_tree_plan,
    "scatter": scatter_plan,
    "gather": gather_plan,
    "reduce, naive": reduce_naive_plan,
    "reduce, tree": reduce_tree_plan,
    "all_gather, ring": all_gather_ring_plan,
    "reduce_scatter, ring": reduce_scatter_ring_plan,
    "reduce_scatter, direct": reduce_scatter_direct_plan,
    "all_to_all": all_to_all_plan,
    "barrier": barrier_plan,
    "all_reduce, naive": naive_plan,
    "all_reduce, tree": tree_plan,
    "all_reduce, halving-doubling": halving_doubling.halving_doubling_plan,
    "all_reduce, ring": ring_plan,
}
