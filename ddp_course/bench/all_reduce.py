"""Every all-reduce of the course beside gloo's own, in one run, for many sizes.

All are measured in turns inside the same ranks, in another order in every turn: what
one leaves behind, in caches and on the cores, is not always to the same one's cost. In
its turn each is called several times without a pause, as nccl-tests do, the first time
uncounted. A time is the mean of a turn's calls on the slowest rank. Beside them stand
gloo a second time, so that one sees how much of a difference is noise; gloo with its
threads held back as in our own collectives (`collectives.patience`); and two limits:
how fast a rank copies memory when all do, and how fast two ranks send over loopback.

Turns during which other programs took much of the machine are left out, if enough
others remain; `others` in the rows is the part that they took in those that count.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ddp_course import collectives
from ddp_course.bench.others import Others, share
from ddp_course.bench.rows import Row, row
from ddp_course.collectives import patience, shared_memory
from ddp_course.launch import spawn
from ddp_course.theory import bus_factor

KIB, MIB = 1 << 10, 1 << 20
SIZES = {
    4 * KIB: 20,
    64 * KIB: 20,
    MIB: 20,
    4 * MIB: 20,
    16 * MIB: 15,
    64 * MIB: 10,
}
QUICK = {4 * KIB: 3, MIB: 3}
CALLED = 8 * MIB  # small tensors are reduced until so many bytes are done
LOUD, ENOUGH = 0.15, 6  # the part of the machine; how many turns
P2P = ("naive", "tree", "halving_doubling", "ring")
Times = dict[str, list[float]]


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each number of ranks, size and algorithm."""
    sizes = QUICK if quick else SIZES
    for ranks in (2,) if quick else (2, 4):
        told = spawn(
            measure, sizes, world_size=ranks, timeout=1200, device="cpu", output="none"
        )
        limits = {name: min(r["limits"][name] for r in told) for name in LIMITS}
        for nbytes in sizes:
            per_rank = [r["times"][nbytes][0] for r in told]
            shares = [
                share(list(turn))
                for turn in zip(*(r["times"][nbytes][1] for r in told), strict=True)
            ]
            turns = quiet(shares)
            slowest = {
                name: [max(r[name][turn] for r in per_rank) for turn in turns]
                for name in per_rank[0]
            }
            others = statistics.median(shares[turn] for turn in turns)
            yield from rows_of(ranks, nbytes, slowest, limits, others)


def quiet(shares: list[float]) -> list[int]:
    """Return the turns to count: those that others left us in peace, if enough are."""
    calm = [turn for turn, others in enumerate(shares) if others <= LOUD]
    return calm if len(calm) >= ENOUGH else list(range(len(shares)))


def rows_of(
    ranks: int, nbytes: int, times: Times, limits: dict[str, float], others: float
) -> Iterator[Row]:
    """Yield the rows of one size: seconds, and the bandwidth beside its limits."""
    where = {"ranks": ranks, "nbytes": nbytes, "others": others}
    size = told(nbytes)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, ours in medians.items():
        if name.startswith("gloo "):
            continue
        collective = name if f"gloo {name}" in medians else "all_reduce"
        theirs = medians[f"gloo {collective}"]
        yield row(
            "all-reduce",
            f"{ranks} ranks, {size}, {name}",
            "seconds",
            ours,
            theirs,
            algorithm=name,
            **where,
        )
    factor = bus_factor("all_reduce", ranks)
    for name, limit in (("ring", "loopback"), ("registered", "memory")):
        yield row(
            "all-reduce",
            f"{ranks} ranks, {size}, {name} beside {limit}",
            "bytes/s",
            factor * nbytes / medians[name],
            limits[limit],
            algorithm=f"{name} beside {limit}",
            **where,
        )


def told(nbytes: int) -> str:
    """Write a size: "64 KiB"."""
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


# ---- on the ranks ------------------------------------------------------------------


def measure(sizes: dict[int, int]) -> dict:
    """On every rank: return the limits, and the times of every turn, by size."""
    limits = {name: limit() for name, limit in LIMITS.items()}
    return {
        "limits": limits,
        "times": {nbytes: in_turns(nbytes, sizes[nbytes]) for nbytes in sizes},
    }


def in_turns(nbytes: int, repetitions: int) -> tuple[Times, list[tuple]]:
    """Measure everything `repetitions` times in turns, on tensors of `nbytes`.

    Returns the times, and for each turn what `Others` told.
    """
    contenders, registered = all_contenders(nbytes)
    calls = max(1, min(20, CALLED // nbytes))
    names = list(contenders)
    times: Times = {name: [] for name in names}
    others, told = Others(), []
    for turn in range(-2, repetitions):  # the first two are to warm up
        others.told()
        order = random.Random(turn).sample(names, len(names))  # on all ranks alike
        for name in order:
            call = contenders[name]
            call()  # what the one before has left in caches and queues is its affair
            collectives.communicator().agree_now("the turn")  # takes microseconds
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds = (time.perf_counter() - start) / calls
            if turn >= 0:
                times[name].append(seconds)
        if turn >= 0:
            told.append(others.told())
    shared_memory.free(registered)
    return times, told


def all_contenders(
    nbytes: int,
) -> tuple[dict[str, Callable[[], object]], torch.Tensor]:
    """Return what is measured, name -> a function, and the tensor in shared memory."""
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
        "gloo reduce_scatter": lambda: _reduce_scatter(shard, whole),
        "reduce_scatter": lambda: collectives.reduce_scatter_single(shard, whole),
        "gloo all_gather": lambda: _all_gather(whole, shard),
        "all_gather": lambda: collectives.all_gather_single(whole, shard),
    }
    for name in P2P:
        contenders[name] = _on(collectives.ALGORITHMS[name], tensor)
    return contenders, registered


def patiently(function: Callable, tensor: torch.Tensor) -> None:
    """Call a collective of PyTorch's as we call ours: see `collectives.patience`."""
    with patience.patient(collectives.communicator().threads):
        function(tensor)


def _on(function: Callable, tensor: torch.Tensor) -> Callable[[], object]:
    return lambda: function(tensor)


def _reduce_scatter(output: torch.Tensor, input: torch.Tensor) -> None:
    """PyTorch's, under the name that it has in this version."""
    new = getattr(dist, "reduce_scatter_single", None)
    (new or dist.reduce_scatter_tensor)(output, input)


def _all_gather(output: torch.Tensor, input: torch.Tensor) -> None:
    new = getattr(dist, "all_gather_single", None)
    (new or dist.all_gather_into_tensor)(output, input)


def memory_bandwidth() -> float:
    """Return how many bytes per second this rank copies while all ranks do."""
    source, target = torch.zeros(16 * MIB), torch.zeros(16 * MIB)
    return source.nbytes / _median_of(5, lambda: target.copy_(source))


def loopback_bandwidth() -> float:
    """Return how many bytes per second rank 0 sends to rank 1 over the network."""
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


LIMITS = {"memory": memory_bandwidth, "loopback": loopback_bandwidth}
