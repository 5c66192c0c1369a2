"""Bytes: what the meter counts is the formula, and what the system counted."""

from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ddp_course import collectives as ours
from ddp_course import theory
from ddp_course.collectives import (
    hierarchical_all_reduce,
    ring,
    ring_all_reduce,
    shared_memory,
)
from ddp_course.collectives.endpoint import Endpoint
from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter, Bytes, SystemBytes

PER_RANK = 16_800  # of 8 bytes: all world sizes, their squares, cache lines divide it


def all_calls() -> dict[str, Callable[[], object]]:
    """Return calls by the names of `theory.bytes_sent`; S is n * PER_RANK doubles."""
    n = dist.get_world_size()
    x = torch.ones(n * PER_RANK, dtype=torch.float64)
    parts = [part.clone() for part in x.chunk(n)]
    part, parts = parts[0].clone(), parts if dist.get_rank() == 0 else None
    names = "naive", "tree", "halving_doubling", "ring"
    return {
        "broadcast_naive": lambda: ours.broadcast(x, algorithm="naive"),
        "broadcast_tree": lambda: ours.broadcast(x),
        "reduce_tree": lambda: ours.reduce(x),
        "scatter": lambda: ours.scatter(part, parts),
        "gather": lambda: ours.gather(part, parts),
        "all_gather": lambda: ours.all_gather_single(x, part),
        "reduce_scatter": lambda: ours.reduce_scatter_single(part, x),
        "all_to_all": lambda: ours.all_to_all_single(x.clone(), x),
    } | {f"all_reduce_{name}": partial(ours.ALGORITHMS[name], x) for name in names}


def counted() -> dict[str, tuple[Bytes, int]]:
    """On every rank: what the meter and the system counted, for each call."""
    got = {}
    ours.barrier()
    for name, call in all_calls().items():
        with SystemBytes() as system, ByteMeter() as meter:
            call()
        got[name] = meter.report(), system.written
    return got


def unmatched(reports: Iterable[Bytes]) -> list[tuple[int, int]]:
    """Return between whom not all that was sent was received: meters check meters."""
    by_rank = {report.rank: report for report in reports}
    pairs = [(a, b) for a in by_rank for b in by_rank]
    return [
        (a, b)
        for a, b in pairs
        if by_rank[a].sent.get(b, 0) != by_rank[b].received.get(a, 0)
    ]


def as_the_formula_says(name: str, results: list[tuple[Bytes, int]]) -> bool:
    """Compare each rank's bytes with the closed form, and with the system's count."""
    n, nbytes = len(results), 8 * PER_RANK * len(results)
    right = theory.bytes_sent(name, n)
    for (report, written), times in zip(results, right, strict=True):
        exact = Fraction(report.total_sent, nbytes) == times
        # Beside the numbers, gloo writes some 100 bytes with each message, and a rank
        # that waits long, of a busy machine, tells why in the store.
        true = abs(written - report.total_sent) <= 0.005 * report.total_sent + 20_000
        if not (exact and true):
            return False
    return not unmatched(report for report, _ in results)


def uneven() -> list[tuple[int, int]]:
    """On every rank: bytes of a ring on sizes that do not divide, and S."""
    got = []
    for numel in (1, 2, 3, 1009, 100_003):
        with ByteMeter() as meter:
            ring_all_reduce(torch.ones(numel))
        got.append((meter.total_sent, 4 * numel))
    return got


def on_two_nodes() -> dict[str, Bytes]:
    """On every rank of a cluster: bytes by link."""
    x, got = torch.ones(PER_RANK), {}
    calls = {
        "sharded": lambda: hierarchical_all_reduce(x),
        "leader": lambda: hierarchical_all_reduce(x, variant="leader"),
        "flat": lambda: ring_all_reduce(x),
    }
    for name, call in calls.items():
        with ByteMeter() as meter:
            call()
        got[name] = meter.report()
    return got


def test_bytes_by_link_are_those_of_the_hierarchy():
    nnodes, each = 3, 2
    results = spawn(on_two_nodes, nnodes=nnodes, nproc_per_node=each, output="none")
    nbytes = 4 * PER_RANK
    for variant in ("sharded", "leader"):
        right = theory.hierarchical_bytes_sent(nnodes, each, variant)
        for rank, wanted in zip(results, right, strict=True):
            assert Fraction(rank[variant].inside, nbytes) == wanted.inside
            assert Fraction(rank[variant].between, nbytes) == wanted.between
    # A flat ring leaves the node at its last rank, with all it has to send.
    n = nnodes * each
    for number, rank in enumerate(results):
        leaves = number % each == each - 1
        assert Fraction(rank["flat"].between, nbytes) == (
            Fraction(2 * (n - 1), n) if leaves else 0
        )


def in_memory() -> dict[str, tuple[Bytes, int]]:
    """On every rank: what goes through shared memory, and what over the network."""
    n, got = dist.get_world_size(), {}
    x = torch.ones(n * PER_RANK)
    registered = shared_memory.empty(n * PER_RANK)
    shared_memory.all_reduce(x)
    for name, tensor in (("staged", x), ("registered", registered.fill_(1))):
        with SystemBytes() as system, ByteMeter() as meter:
            shared_memory.all_reduce(tensor)
        got[name] = meter.report(), system.written
    return got


@pytest.mark.parametrize("n", [3, 8])
def test_every_rank_sends_what_the_formula_says(n):
    results = spawn(
        lambda: (counted(), uneven(), in_memory()), world_size=n, timeout=240
    )
    for name in results[0][0]:
        assert as_the_formula_says(name, [rank[name] for rank, _, _ in results]), name
    for _, of_a_ring, _ in results:
        for sent, nbytes in of_a_ring:  # within one chunk
            chunk = 4 * -(-nbytes // 4 // n)
            assert abs(sent - 2 * (n - 1) / n * nbytes) <= chunk
    nbytes = n * PER_RANK * 4
    for name in ("staged", "registered"):
        memory = [rank[name] for _, _, rank in results]
        assert not unmatched(report for report, _ in memory)
        moved = 2 * (n - 1) / n * nbytes  # the others' part of mine, mine of theirs
        for report, written in memory:
            # Slices begin at cache lines, so some are a few numbers longer.
            assert report.total_received == pytest.approx(moved, rel=0.01)
            assert written < 0.1 * moved  # but for a note in the store


# ---- what a wrong all-reduce would look like ---------------------------------------


def exchange(message: torch.Tensor) -> torch.Tensor:
    """Send to the right, receive from the left."""
    got = torch.empty_like(message)
    ring.right_and_left(message, got, Endpoint())
    return got


def whole_tensor_ring(x: torch.Tensor) -> None:
    """N / 2 times the bytes: everyone's whole tensor goes round, everyone adds."""
    passing = x.clone()
    for _ in range(dist.get_world_size() - 1):
        passing = exchange(passing)
        x += passing


def ring_of_whole_tensors(x: torch.Tensor) -> None:
    """N times the bytes: the right chunks, but the whole tensor in each message."""
    me, n = dist.get_rank(), dist.get_world_size()
    chunks = list(x.chunk(n))
    for k in range(2 * (n - 1)):
        got = exchange(x).chunk(n)[(me - k - 1) % n]
        mine = chunks[(me - k - 1) % n]
        mine.copy_(got + mine if k < n - 1 else got)


def forgets_the_rest(x: torch.Tensor) -> None:
    """Right for sizes that divide; otherwise the last elements are never added."""
    n = dist.get_world_size()
    ring_all_reduce(x[: x.numel() // n * n])


def own_first(x: torch.Tensor) -> None:
    """The right bytes, but every rank adds up in an order of its own."""
    me, n = dist.get_rank(), dist.get_world_size()
    everyone = [torch.empty_like(x) for _ in range(n)]
    ring_all_reduce(x.clone())  # the bytes of a ring
    dist.all_gather(everyone, x)
    x.zero_()
    for k in range(n):
        x += everyone[(me + k) % n]


def judged(all_reduce) -> dict[str, object]:
    """On every rank: the facts by which an all-reduce is judged."""
    n, me = dist.get_world_size(), dist.get_rank()
    whole = torch.arange(12 * n + 1, dtype=torch.float64) + me
    right = whole.clone()
    dist.all_reduce(right)
    all_reduce(whole)
    torch.manual_seed(me)
    real = torch.randn(12 * 1000 * n)
    total = real.clone()
    dist.all_reduce(total)
    with ByteMeter() as meter:
        all_reduce(real)
    return {
        "numbers": torch.equal(whole, right),
        "allclose": torch.allclose(real, total, atol=1e-5),
        "bits": real.numpy().tobytes(),
        "sent": Fraction(meter.total_sent, real.nbytes),
    }


def faults(n: int, results: list[dict]) -> set[str]:
    """Return by which of the checks an all-reduce is rejected."""
    found = set()
    if not all(rank["numbers"] for rank in results):
        found.add("numbers")
    if len({rank["bits"] for rank in results}) > 1:
        found.add("bits")
    if [r["sent"] for r in results] != theory.bytes_sent("all_reduce_ring", n):
        found.add("bytes")
    return found


RINGS = {
    ring_all_reduce: set(),
    ring.around_the_ring: set(),
    whole_tensor_ring: {"bytes", "bits"},
    ring_of_whole_tensors: {"bytes"},
    forgets_the_rest: {"numbers"},
    own_first: {"bits"},
}


def test_wrong_rings_are_rejected():
    results = spawn(lambda: [judged(one) for one in RINGS], world_size=3, output="none")
    for expected, facts in zip(RINGS.values(), zip(*results, strict=True), strict=True):
        assert expected <= faults(3, facts), faults(3, facts)
        assert bool(expected) == bool(faults(3, facts))
        if expected != {"numbers"}:
            assert all(rank["allclose"] for rank in facts)  # which sees none of it
