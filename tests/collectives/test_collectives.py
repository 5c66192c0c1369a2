"""Every collective on real ranks, against `torch.distributed`, and bit by bit."""

from __future__ import annotations

import zlib

import pytest
import torch
import torch.distributed as dist

from ddp_course import collectives as ours
from ddp_course.collectives import (
    halving_doubling,
    hierarchical,
    naive,
    ring,
    shared_memory,
    tree,
)
from ddp_course.collectives.call import Run
from ddp_course.collectives.port import Port
from ddp_course.collectives.rooted import BROADCASTS, REDUCES
from ddp_course.collectives.runtime import PIECE
from ddp_course.collectives.shards import ALL_GATHERS, REDUCE_SCATTERS
from ddp_course.launch import spawn

WORLD_SIZES = [1, 2, 3, 4, 5, 8]
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
OPS = [SUM, AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.bool,
]
ALL_REDUCES = {
    "naive": naive.all_reduce,
    "tree": tree.all_reduce,
    "halving_doubling": halving_doubling.all_reduce,
    "ring": ring.all_reduce,
    "hierarchical": hierarchical.all_reduce,
    "leader": lambda *args, **more: hierarchical.all_reduce(
        *args, variant="leader", **more
    ),
    "shared_memory": shared_memory.all_reduce,
    "chosen": ours.all_reduce,
}


def longest(n: int) -> int:
    """As many numbers for 8 ranks as for 2: two cores do the work of all of them."""
    return 2_000_003 // max(n, 2)


def sizes(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 1009, longest(n)})


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers: every sum of them is exact, in any order."""
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if dtype in (torch.bool, torch.float16, torch.bfloat16) else 4
    return torch.randint(0, highest, (numel,), generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def cases(n: int):
    """Yield (numel, dtype, op): every size, every type, every op, not all of all."""
    for numel in sizes(n):
        yield numel, torch.float32, SUM
    for dtype in DTYPES:
        for op in OPS:
            if op != AVG or dtype.is_floating_point:
                yield 1009, dtype, op
    yield longest(n), torch.bfloat16, AVG
    yield longest(n), torch.int64, SUM


def wrong_all_reduces(group=None) -> list[str]:
    """On every rank: compare each all-reduce with PyTorch's, in every case."""
    wrong, me = [], dist.get_rank()
    n = dist.get_world_size(group)
    for numel, dtype, op in cases(n):
        right = numbers(numel, dtype, me)
        dist.all_reduce(right, op, group)
        for name, all_reduce in ALL_REDUCES.items():
            mine = numbers(numel, dtype, me)
            all_reduce(mine, op, group)
            if not torch.equal(mine, right) and not close(mine, right, op):
                wrong.append(f"{name}: {numel} {dtype} {op}")
    for numel in sizes(n):  # all dimensions, and any real numbers: the same bits
        shape = (numel // 2, 2, 1) if numel % 2 == 0 else (1, numel)
        for name, all_reduce in ALL_REDUCES.items():
            torch.manual_seed(me)
            mine = torch.randn(shape) * 1000
            all_reduce(mine, AVG, group)
            digests = [None] * n
            dist.all_gather_object(digests, zlib.crc32(bits(mine)), group=group)
            if len(set(digests)) > 1:
                wrong.append(f"{name}: replicas of {numel} differ")
    return wrong


def close(mine, right, op) -> bool:
    """Allow the roundings of a mean: gloo divides at another point than we do."""
    return op == AVG and torch.allclose(mine.double(), right.double(), rtol=1e-2)


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_all_reduces_equal_pytorchs(n):
    assert spawn(wrong_all_reduces, world_size=n, output="none") == [[]] * n


def in_groups() -> list[str]:
    """On every rank of five: two groups at the same time, one of them not in order."""
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([1, 3])
    mine = odds if dist.get_rank() % 2 else evens
    wrong = wrong_all_reduces(mine)
    value = torch.tensor([dist.get_rank()])
    root = 3 if dist.get_rank() % 2 else 4
    ours.broadcast(value, root, mine)
    return wrong + ([] if value.item() == root else ["broadcast"])


def test_all_reduces_in_groups():
    assert spawn(in_groups, world_size=5, output="none") == [[]] * 5


def wrong_others() -> list[str]:
    """On every rank: the other collectives against PyTorch's."""
    wrong = []
    me, n = dist.get_rank(), dist.get_world_size()

    def compare(name, mine, right):
        for a, b in zip(mine, right, strict=True):
            if a.dtype != b.dtype or not torch.equal(a, b):
                wrong.append(name)

    for numel in sizes(n):
        for dtype in DTYPES:
            if numel != 1009 and dtype != torch.float32:
                continue
            one = numbers(numel, dtype, me)
            many = [numbers(numel, dtype, 100 * me + k) for k in range(n)]
            told = f"{numel} {dtype}"
            for root in {0, n - 1}:
                for algorithm in BROADCASTS:
                    a, b = one.clone(), one.clone()
                    ours.broadcast(a, root, algorithm=algorithm)
                    dist.broadcast(b, root)
                    compare(f"broadcast {algorithm} {told}", [a], [b])
                for algorithm in REDUCES:
                    a, b = one.clone(), one.clone()
                    ours.reduce(a, root, algorithm=algorithm)
                    dist.reduce(b, root)
                    # PyTorch's leaves something else on the others; ours, what was.
                    right = b if me == root else one
                    compare(f"reduce {algorithm} {told}", [a], [right])
                a, b = torch.empty_like(one), torch.empty_like(one)
                ours.scatter(a, many if me == root else None, root)
                dist.scatter(b, many if me == root else None, root)
                compare(f"scatter {told}", [a], [b])
                a = [torch.empty_like(one) for _ in many] if me == root else None
                b = [torch.empty_like(one) for _ in many] if me == root else None
                ours.gather(one, a, root)
                dist.gather(one, b, root)
                compare(f"gather {told}", a or [], b or [])
            for algorithm in ALL_GATHERS:
                a, b = ([torch.empty_like(one) for _ in many] for _ in range(2))
                ours.all_gather(a, one, algorithm=algorithm)
                dist.all_gather(b, one)
                compare(f"all_gather {algorithm} {told}", a, b)
                whole = torch.empty(n * numel, dtype=dtype)
                ours.all_gather_single(whole, one, algorithm=algorithm)
                compare(f"all_gather_single {told}", [whole], [torch.cat(b)])
            for algorithm in REDUCE_SCATTERS:
                for op in OPS if numel == 1009 else [SUM]:
                    if op == AVG and not dtype.is_floating_point:
                        continue
                    kept = [t.clone() for t in many]
                    a, b = torch.empty_like(one), torch.empty_like(one)
                    ours.reduce_scatter(a, many, op, algorithm=algorithm)
                    dist.reduce_scatter(b, [t.clone() for t in many], op)
                    name = f"reduce_scatter {algorithm} {op} {told}"
                    if not close(a, b, op):
                        compare(name, [a], [b])
                    compare(f"inputs of {name}", many, kept)
                    ours.reduce_scatter_single(
                        a, torch.cat(many), op, algorithm=algorithm
                    )
                    if not close(a, b, op):
                        compare(f"{name} single", [a], [b])
            a, b = ([torch.empty_like(one) for _ in many] for _ in range(2))
            ours.all_to_all(a, many)
            dist.all_to_all(b, many)
            compare(f"all_to_all {told}", a, b)
    return wrong


@pytest.mark.parametrize("n", WORLD_SIZES)
def test_the_other_collectives_equal_pytorchs(n):
    assert spawn(wrong_others, world_size=n, output="none") == [[]] * n


def uneven_all_to_all() -> bool:
    """On every rank: rank i has i + 2 j numbers for rank j."""
    me, n = dist.get_rank(), dist.get_world_size()
    gives = [me + 2 * j for j in range(n)]
    gets = [i + 2 * me for i in range(n)]
    source = torch.arange(sum(gives)) + 1000 * me
    mine, theirs = (torch.empty(sum(gets), dtype=torch.int64) for _ in range(2))
    ours.all_to_all_single(mine, source, gets, gives)
    dist.all_to_all_single(theirs, source, gets, gives)
    return torch.equal(mine, theirs)


def test_all_to_all_with_uneven_parts():
    assert all(spawn(uneven_all_to_all, world_size=3, output="none"))


def long_integers() -> list[bool]:
    """On every rank: chunks of more than one piece, of a type that is not float32."""
    me, n = dist.get_rank(), dist.get_world_size()
    numel = PIECE // 4 + 1  # of 8 bytes: more than two pieces
    rows = [torch.full((numel,), 10 * me + j) for j in range(n)]
    got = [torch.empty_like(row) for row in rows]
    ours.all_to_all(got, rows)
    right = [all((t == 10 * i + me).all() for i, t in enumerate(got))]
    ours.scatter(got[0], rows if me == n - 1 else None, n - 1)
    right.append(bool((got[0] == 10 * (n - 1) + me).all()))
    ours.gather(rows[0], got if me == 1 else None, 1)
    return [*right, me != 1 or all((t == 10 * i).all() for i, t in enumerate(got))]


def test_all_ranks_cut_the_same_pieces():
    assert spawn(long_integers, world_size=3, output="none") == [[True] * 3] * 3


def step_by_step_is_the_same() -> list[str]:
    """On every rank: the runtime that GPUs use gives the same bits."""
    from ddp_course.collectives import runtime

    def plan(self, plan, buffer, *, piece=0, op=None):
        runtime.step_by_step(plan, buffer, self.port, op or self.op)

    torch.manual_seed(dist.get_rank())
    wrong, pipelined, exchange = [], Run.plan, Port.exchange
    for name, all_reduce in ALL_REDUCES.items():
        x = torch.randn(300_007)
        a, b, c = x.clone(), x.clone(), x.clone()
        all_reduce(a, AVG)
        Run.plan = plan
        all_reduce(b, AVG)
        Port.exchange = Port._exchange_on_gpus  # gloo takes such batches, too
        all_reduce(c, AVG)
        ours.barrier()
        Run.plan, Port.exchange = pipelined, exchange
        if not bits(a) == bits(b) == bits(c):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("n", [3, 4])
def test_in_pieces_or_step_by_step(n):
    assert spawn(step_by_step_is_the_same, world_size=n, output="none") == [[]] * n


def many_at_once() -> list[float]:
    """On every rank: collectives under way, others called meanwhile, in order."""
    me, n = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((50_000,), float(me + k)) for k in range(8)]
    works = [ring.all_reduce(t, async_op=True) for t in tensors]
    here = torch.tensor([float(me)])
    tree.all_reduce(here)  # waits its turn
    assert all(work.wait() for work in works)
    assert all(work.is_completed() for work in works)
    ours.barrier(async_op=True).wait()
    return [t[-1].item() - n * k for k, t in enumerate(tensors)] + [here.item()]


def test_collectives_under_way():
    assert spawn(many_at_once, world_size=4, output="none") == [[6.0] * 9] * 4


def nobody_passes_a_barrier_early() -> float:
    """On every rank: come at different times; return by how much one left too early."""
    import time

    time.sleep(0.1 * dist.get_rank())
    came = time.monotonic()
    ours.barrier()
    left = time.monotonic()
    times = torch.tensor([came, -left], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return (times[0] + times[1]).item()  # the last to come, minus the first to leave


def test_a_barrier_waits_for_all():
    assert max(spawn(nobody_passes_a_barrier_early, world_size=3)) <= 0
