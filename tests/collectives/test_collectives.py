"""Every collective on real ranks, against `torch.distributed`, and bit by bit."""

import os
import time
import zlib
from functools import partial

import pytest
import torch
import torch.distributed as dist

from ddp_course import collectives as ours
from ddp_course.collectives import (
    CollectiveError,
    hierarchical_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
    unrooted,
)
from ddp_course.collectives.call import Collective
from ddp_course.collectives.rooted import BROADCASTS
from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter

WORLD_SIZES = [1, 2, 5]  # and two and three, in groups of five
WORLD_SIZES += [8] if os.environ.get("DDP_COURSE_ENDURANCE") else []
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
OPS = [SUM, AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT]
FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
DTYPES = *FLOATS, torch.int64, torch.bool
ALL_REDUCES = ours.ALGORITHMS | {
    "leader": partial(hierarchical_all_reduce, variant="leader"),
    "chosen": ours.all_reduce,
}


def longest(n: int) -> int:
    """For two ranks more than travels in one piece; more ranks have two cores, too."""
    return 1_100_003 if n == 2 else 40_009


def sizes(n: int) -> list[int]:
    return sorted({0, 1, n - 1, n, n + 1, 1009, longest(n)})


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small whole numbers: every sum of them is exact, in any order."""
    generator = torch.Generator().manual_seed(seed)
    highest = 2 if dtype in (torch.bool, torch.float16, torch.bfloat16) else 4
    return torch.randint(0, highest, (numel,), generator=generator).to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def operations(dtype: torch.dtype, n: int) -> list[dist.ReduceOp]:
    """Every type, every op; all of all up to 3 ranks: more have two cores, too."""
    ops = OPS if n < 4 or dtype == torch.float32 else [SUM]
    return [op for op in ops if op != AVG or dtype.is_floating_point]


def cases(n: int):
    """Yield (numel, dtype, op): every size, and every operation of 1009 numbers."""
    for numel in sizes(n):
        yield numel, torch.float32, SUM
    for dtype in DTYPES:
        for op in operations(dtype, n):
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


def my_group() -> dist.ProcessGroup:
    """On every rank of five: two groups, at work at the same time."""
    evens, odds = dist.new_group([0, 2, 4]), dist.new_group([1, 3])
    return odds if dist.get_rank() % 2 else evens


def wrong_others(numels: list[int], group=None) -> list[str]:
    """On every rank: the other collectives against PyTorch's, in every case.

    Returns what differs. Roots are ranks of the whole job, as everywhere in PyTorch.
    """
    wrong, me, n = [], dist.get_rank(), dist.get_world_size(group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)

    def check(name, outputs, right, call, *args, op=SUM, **more):
        """Call ours; compare its `outputs` with what is right."""
        try:
            call(*args, group=group, **more)
        except CollectiveError as error:  # on all ranks alike
            wrong.append(f"{name}: {error}")
        else:
            for a, b in zip(outputs, right, strict=True):
                if a.dtype != b.dtype or not (torch.equal(a, b) or close(a, b, op)):
                    wrong.append(name)

    def empty(times=None):
        """Return an empty tensor, or a list of them, like `one`."""
        return torch.empty_like(one) if times is None else [empty() for _ in times]

    for numel, dtype in [(k, d) for k in numels for d in DTYPES]:
        if numel != 1009 and dtype != torch.float32:
            continue
        one = numbers(numel, dtype, me)
        many = [numbers(numel, dtype, 100 * me + k) for k in range(n)]
        ops = operations(dtype, n) if numel == 1009 else [SUM]
        results = f"{numel} {dtype}"
        for root in {ranks[0], ranks[-1]}:
            b = one.clone()
            dist.broadcast(b, root, group)
            for way in BROADCASTS:
                a, name = one.clone(), f"broadcast {way} {results}"
                check(name, [a], [b], ours.broadcast, a, root, algorithm=way)
            a, b, inputs = empty(), empty(), many if me == root else None
            dist.scatter(b, inputs, root, group)
            check(f"scatter {results}", [a], [b], ours.scatter, a, inputs, root)
            a, b = (empty(many) if me == root else None for _ in range(2))
            dist.gather(one, b, root, group)
            check(f"gather {results}", a or [], b or [], ours.gather, one, a, root)
            for op in ops:
                b = one.clone()
                dist.reduce(b, root, op, group)
                # PyTorch's leaves something else on the others; ours, what was.
                right = [b if me == root else one]
                a, name = one.clone(), f"reduce {op} {results}"
                check(name, [a], right, ours.reduce, a, root, op, op=op)
        a, b, whole = empty(many), empty(many), torch.cat(empty(many))
        dist.all_gather(b, one, group)
        name, right = f"all_gather {results}", [torch.cat(b)]
        check(name, a, b, ours.all_gather, a, one)
        check(f"{name} single", [whole], right, ours.all_gather_single, whole, one)
        for op in ops:
            a, b, kept = empty(), empty(), [t.clone() for t in many]
            dist.reduce_scatter(b, kept, op, group)
            kept, name = [t.clone() for t in many], f"reduce_scatter {op} {results}"
            check(name, [a], [b], ours.reduce_scatter, a, kept, op, op=op)
            if not all(map(torch.equal, kept, many)):
                wrong.append(f"inputs of {name}")
            a, flat, single = empty(), torch.cat(many), ours.reduce_scatter_single
            check(f"{name} single", [a], [b], single, a, flat, op, op=op)
        a, b = empty(many), empty(many)
        dist.all_to_all(b, many, group)
        a, flat, name = torch.cat(a), torch.cat(many), f"all_to_all {results}"
        check(name, [a], [torch.cat(b)], ours.all_to_all_single, a, flat)
        for rows in ((), (3,), (2, 0)):
            drawn = drawn_parts(dist.get_rank(group), n, numel, rows, dtype)
            a, b, *parts = drawn
            dist.all_to_all_single(b, *parts, group=group)
            name = f"all_to_all by parts of rows {list(rows)} {results}"
            check(name, [a], [b], ours.all_to_all_single, a, *parts)
    return wrong


def drawn_parts(
    me: int, n: int, most: int, row: tuple[int, ...], dtype: torch.dtype
) -> tuple:
    """Draw how many rows each rank sends to each, some of them none.

    Returns two outputs, the input, and how many rows come and go.
    """
    chance = torch.Generator().manual_seed(most)
    rows = torch.randint(0, most // 2 + 2, (n, n), generator=chance)
    rows[torch.rand(n, n, generator=chance) < 0.3] = 0
    goes, comes = rows[me].tolist(), rows[:, me].tolist()
    outputs = [torch.full((sum(comes), *row), 3).to(dtype) for _ in range(2)]
    numel = sum(goes) * torch.Size(row).numel()
    sent = numbers(numel, dtype, me).view(sum(goes), *row)
    return *outputs, sent, comes, goes


def with_equal_parts() -> list[str]:
    """Plant a mistake: the sizes of parts are ignored."""
    unrooted._split_sizes = lambda call, role, tensor, split: [
        len(tensor) * (k + 1) // call.size - len(tensor) * k // call.size
        for k in range(call.size)
    ]
    return wrong_others([1009])


def test_parts_of_ignored_sizes_are_seen():
    results = spawn(with_equal_parts, world_size=3, output="none", timeout=240)
    assert {mistake.split()[0] for wrong in results for mistake in wrong} == {
        "all_to_all"
    }


def parts_by_nccls_rules() -> tuple[bool, int, int]:
    """Send parts, some of them empty, step by step.

    Returns whether all came, the bytes that were sent, and that must be.
    """
    me, table = dist.get_rank(), torch.tensor([[0, 2, 1], [3, 1, 0], [1, 1, 2]])
    goes, comes = table[me].tolist(), table[:, me].tolist()
    sent = torch.arange(2.0 * sum(goes)).view(-1, 2) + 100 * me
    a, b = (torch.empty(sum(comes), 2) for _ in range(2))
    dist.all_to_all_single(a, sent, comes, goes)
    with ByteMeter() as meter:
        ours.all_to_all_single(b, sent, comes, goes)
    return torch.equal(a, b), meter.total_sent, 8 * (sum(goes) - goes[me])


def test_parts_are_sent_by_nccls_rules_and_nothing_else_is():
    results = spawn(parts_by_nccls_rules, world_size=3, output="none", backend="strict")
    assert all(same and sent == wanted for same, sent, wanted in results), results


def wrong_anywhere(n: int) -> list[str]:
    """On every rank: all collectives; of five ranks, also in two groups at once."""
    wrong = wrong_all_reduces() + wrong_others(sizes(n))
    if n == 5:
        group = my_group()
        wrong += wrong_all_reduces(group) + wrong_others([0, 7, 1009], group)
    return wrong


@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", WORLD_SIZES)
def test_all_collectives_equal_pytorchs(n):
    how = {"world_size": n, "output": "none", "timeout": 840}
    assert spawn(wrong_anywhere, n, **how) == [[]] * n


def roots_are_ranks_of_the_group() -> list[str]:
    """Plant a mistake: a root is taken for a number within the group."""
    Collective.root = lambda self, name, rank: rank % self.size
    return wrong_others([7, 1009], my_group())


def test_a_root_taken_for_a_rank_of_the_group_is_seen():
    how = {"world_size": 5, "output": "none", "timeout": 280}
    results = spawn(roots_are_ranks_of_the_group, **how)
    names = {mistake.split()[0] for wrong in results for mistake in wrong}
    assert names == {"broadcast", "reduce", "scatter", "gather"}


def many_at_once() -> list[float]:
    """Collectives under way, others called meanwhile, in order."""
    me, n = dist.get_rank(), dist.get_world_size()
    tensors = [torch.full((50_000,), float(me + k)) for k in range(8)]
    works = [ring_all_reduce(t, async_op=True) for t in tensors]
    here = torch.tensor([float(me)])
    tree_all_reduce(here)  # waits its turn
    assert all(work.wait() for work in works)
    assert all(work.is_completed() for work in works)
    ours.barrier(async_op=True).wait()
    return [t[-1].item() - n * k for k, t in enumerate(tensors)] + [here.item()]


def early() -> float:
    """Come to a barrier at different times; return by how much one left too early."""
    time.sleep(0.1 * dist.get_rank())
    came = time.monotonic()
    ours.barrier()
    left = time.monotonic()
    times = torch.tensor([came, -left], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return (times[0] + times[1]).item()  # the last to come, minus the first to leave


def test_collectives_under_way_and_a_barrier_that_waits_for_all():
    results = spawn(lambda: (many_at_once(), early() <= 0), world_size=4, output="none")
    assert results == [([6.0] * 9, True)] * 4
