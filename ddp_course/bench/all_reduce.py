"""Every all-reduce of the course beside gloo's own, in one run, for many sizes.

In its turn, each algorithm is called several times without a pause, as in nccl-tests; a
time is the mean of these calls. Also measured are gloo a second time, which shows the
noise; gloo with its threads scheduled as our collectives do (`collectives.patience`);
and two limits: the speed at which a rank copies memory while all ranks do, and the
speed at which one rank sends to another over loopback. Chapter 03.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from ddp_course import collectives
from ddp_course.bench import steps
from ddp_course.bench.turns import Pair, Row, Timings, against, row, rows_of, slowest
from ddp_course.collectives import patience, shared_memory
from ddp_course.theory import bus_factor

ABOUT = "Each all-reduce, all-gather and reduce-scatter of the course beside gloo's."
KIB, MIB = 1 << 10, 1 << 20
SIZES = dict.fromkeys((4 * KIB, 64 * KIB, MIB, 4 * MIB), 20)
SIZES |= {16 * MIB: 15, 64 * MIB: 10}
QUICK = {4 * KIB: 5, MIB: 5, 16 * MIB: 3}
CALLED = 8 * MIB  # bytes to reduce in a turn; calls are repeated, at most 20 times
# PyTorch's functions, under their names in this version.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
P2P = ("naive", "tree", "halving_doubling", "ring")
OURS = "shared_memory", "registered", "chosen"
LIMITED = tuple(  # pairs (algorithm, the limit that it is compared with)
    Pair(ours, limit, title=f"{ours} over {limit}", over="the bandwidth of its limit")
    for ours, limit in (("ring", "loopback"), ("registered", "memory"))
)
PAIRS = (
    *against("gloo all_reduce", dict.fromkeys(("again", "gloo, patient", *P2P, *OURS))),
    *against("gloo reduce_scatter", {"reduce_scatter": None}),
    *against("gloo all_gather", {"all_gather": None}),
    *LIMITED,
)


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each number of ranks, size and algorithm."""
    sizes = QUICK if quick else SIZES
    for ranks in steps.RANKS:
        seconds = steps.BUDGET[quick] / 2 / len(sizes)
        results = steps.on_ranks(ranks, measure, sizes, seconds)
        limits = {
            p.denominator: min(r["limits"][p.denominator] for r in results)
            for p in LIMITED
        }
        for nbytes in sizes:
            times = [r["times"][nbytes] for r in results]
            yield from rows_of_size(ranks, nbytes, times, limits)


def rows_of_size(
    ranks: int, nbytes: int, timings: list[Timings], limits: dict[str, float]
) -> Iterator[Row]:
    """Yield the rows of one size: seconds, and bandwidths beside their limits."""
    size = f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
    case = f"{ranks} ranks, {size}"
    where = {"ranks": ranks, "nbytes": nbytes}
    yield from rows_of(case, PAIRS, timings, **where)
    times, others = slowest(timings)
    for pair in LIMITED:
        seconds = statistics.median(times[pair.variant])
        ours = bus_factor("all_reduce", ranks) * nbytes / seconds
        theirs = limits[pair.denominator]
        yield row(case, pair, "bytes/s", ours, theirs, **where, others=others)


# ---- on the ranks ------------------------------------------------------------------


def measure(sizes: dict[int, int], seconds: float) -> dict:
    """Return bandwidth limits, and each size's times by turn; called by all ranks."""
    limits = {"memory": memory_bandwidth(), "loopback": loopback_bandwidth()}
    times = {}
    for nbytes, turns in sizes.items():
        contenders, registered = all_contenders(nbytes)
        calls = max(1, min(20, CALLED // nbytes))
        times[nbytes] = steps.together(contenders, turns, seconds, calls, warm=4)
        shared_memory.free(registered)
    return {"limits": limits, "times": times}


def all_contenders(nbytes: int) -> tuple[dict[str, Callable[[], object]], torch.Tensor]:
    """Return {name: function to measure}, and the tensor in shared memory."""
    n, numel = dist.get_world_size(), nbytes // 4
    # Zeros stay zeros, however often they are added.
    tensor, shard = torch.zeros(numel), torch.zeros(numel // n)
    whole = torch.zeros(shard.numel() * n)
    registered = shared_memory.empty(numel)
    registered.zero_()
    contenders = {
        "gloo all_reduce": lambda: dist.all_reduce(tensor),
        "again": lambda: dist.all_reduce(tensor),
        "gloo, patient": lambda: patiently(dist.all_reduce, tensor),
        "shared_memory": lambda: shared_memory.all_reduce(tensor),
        "registered": lambda: shared_memory.all_reduce(registered),
        "chosen": lambda: collectives.all_reduce(tensor),
        "gloo reduce_scatter": lambda: REDUCE_SCATTER(shard, whole),
        "reduce_scatter": lambda: collectives.reduce_scatter_single(shard, whole),
        "gloo all_gather": lambda: ALL_GATHER(whole, shard),
        "all_gather": lambda: collectives.all_gather_single(whole, shard),
    }
    for name in P2P:
        contenders[name] = partial(collectives.ALGORITHMS[name], tensor)
    return contenders, registered


def patiently(function: Callable, tensor: torch.Tensor) -> None:
    """Call a collective of PyTorch with gloo's threads scheduled by `patience`."""
    with patience.patient(patience.threads_of(collectives.communicator())):
        function(tensor)


def memory_bandwidth() -> float:
    """Return the bytes per second that this rank copies while all ranks copy."""
    source, target = torch.zeros(16 * MIB), torch.zeros(16 * MIB)
    return source.nbytes / _median_of(5, lambda: target.copy_(source))


def loopback_bandwidth() -> float:
    """Return the bytes per second that rank 0 sends to rank 1 over loopback."""
    message = torch.zeros(16 * MIB)

    def once() -> None:
        if dist.get_rank() == 0:
            dist.send(message, 1)
        elif dist.get_rank() == 1:
            dist.recv(message, 0)

    seconds = torch.tensor(_median_of(5, once))
    dist.broadcast(seconds, 1)
    return message.nbytes / seconds.item()


def _median_of(repetitions: int, once: Callable[[], object]) -> float:
    times = []
    for _ in range(repetitions):
        dist.barrier()
        start = time.perf_counter()
        once()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
