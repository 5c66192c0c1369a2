"""Collectives in shared memory: as PyTorch's own, bit by bit, and without races."""

import gc
import random
import time
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from memory_cases import exchange, mappings
from on_ranks import error_of

from ddp_course.collectives import staging as module
from ddp_course.collectives.memory_barrier import Barrier
from ddp_course.collectives.reduction import COMBINE, ReduceOp, check_op
from ddp_course.collectives.staging import (
    ONE_SHOT,
    Staging,
    SymmetricMemory,
    combine,
    cuts,
)
from ddp_course.launch import spawn

FLOATS = torch.float32, torch.float16, torch.bfloat16, torch.float64
DTYPES = *FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64
ROUGH_OPS = ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT
SLOT = 128 << 10  # small, so that not even long tensors take long
ROOM = 6 << 20  # bytes of each rank's symmetric memory


def memories(slot=SLOT, room=ROOM, kind=Staging, barrier=Barrier):
    """Return both ways to reduce in shared memory, at one barrier."""
    here = barrier(dist.get_rank(), dist.get_world_size(), exchange)
    return kind(here, exchange, slot), SymmetricMemory(here, room, exchange)


def placed(memory: SymmetricMemory, tensor: torch.Tensor, skip=0) -> torch.Tensor:
    """Return a copy of `tensor` that lies in symmetric memory, `skip` bytes into it."""
    place = memory.own[skip : skip + tensor.nbytes].view(tensor.dtype)
    return place.view(tensor.shape).copy_(tensor)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers of which any sum is exact in float32 and int64."""
    dice = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.bool, torch.uint8) else -8
    return torch.randint(low, 9, (numel,), generator=dice).to(dtype)


def rough(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers whose sum depends on the order in which they are added."""
    dice = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-4, 5, (numel,), generator=dice)
    return (torch.randn(numel, generator=dice) * scale).to(dtype)


def in_rank_order(tensor: torch.Tensor, op) -> torch.Tensor:
    """Return the reduction as it is meant: rank 0's, and 1's, and 2's, ..."""
    first, *others = exchange(tensor)
    result = first.clone()
    for other in others:
        COMBINE[op](result, other, out=result)
    return result / dist.get_world_size() if op == ReduceOp.AVG else result


# ---- plain functions ---------------------------------------------------------------


def right_slices(edges: tuple[int, ...], numel: int, size: int, itemsize: int) -> bool:
    lengths = [b - a for a, b in pairwise(edges)]
    return (
        len(edges) == size + 1
        and (edges[0], edges[-1]) == (0, numel)
        and min(lengths) >= 0
        and max(lengths) * itemsize < numel * itemsize / size + 64 + itemsize
        and all(e == numel or e * itemsize % 64 == 0 for e in edges)
    )


def forgets_the_rest(numel: int, size: int, itemsize: int) -> tuple[int, ...]:
    """Plant a mistake: if the slices are uneven, the last elements are nobody's."""
    return tuple(r * (numel // size // 16 * 16) for r in range(size + 1))


@given(st.integers(0, 10**9), st.integers(1, 64), st.sampled_from([1, 2, 4, 8, 16]))
def test_slices_cover_everything_and_begin_at_cache_lines(numel, size, itemsize):
    assert right_slices(cuts(numel, size, itemsize), numel, size, itemsize)
    assert not right_slices(forgets_the_rest(1009, 3, 4), 1009, 3, 4)


@pytest.mark.parametrize("out", ["first", "second", "elsewhere"])
def test_combining_keeps_the_order_of_ranks(out):
    inputs = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 2.0)]
    places = {"first": inputs[0], "second": inputs[1], "elsewhere": torch.empty(1)}
    combine(inputs, ReduceOp.AVG, places[out])
    assert places[out].item() == 0.5  # ((1e8 + 1) - 1e8 + 2) / 4, where 1e8 + 1 is 1e8


# ---- against PyTorch ---------------------------------------------------------------


def reference(x: torch.Tensor, op) -> torch.Tensor:
    """Return PyTorch's own all-reduce, where it has one and the numbers are exact."""
    inexact = (torch.uint8, torch.bfloat16, torch.complex64)
    # Of bools gloo makes bytes that are neither 0 nor 1 (torch 2.13).
    if op == ReduceOp.AVG or x.dtype in (*inexact, torch.bool):
        return in_rank_order(x, op)
    expected = x.clone()
    dist.all_reduce(expected, op=op)
    return expected


def compare(numels, dtypes, ops=(ReduceOp.SUM,), make=numbers) -> list[str]:
    """Return where staged or symmetric all-reduce differs from what is meant.

    That is PyTorch's, or, for numbers that cannot be added exactly, the sum in the
    order of the ranks: the same bits on all of them.
    """
    right = reference if make is numbers else in_rank_order
    staging, memory = memories()
    rank, wrong = dist.get_rank(), []
    cases = [(d, op, n) for d in dtypes for op in ops for n in numels]
    for dtype, op, numel in cases:
        if check_op(op, dtype):
            continue
        x = make(numel, dtype, seed=numel * 10 + rank)
        expected = raw(right(x, op))
        one, other = x.clone(), placed(memory, x, skip=64)
        memory.all_reduce(other, op)
        if raw(other) != expected:
            wrong.append(f"symmetric {op} of {numel} {dtype}")
        staging.all_reduce(one, op)
        if raw(one) != expected:
            wrong.append(f"staged {op} of {numel} {dtype}")
    return wrong


@pytest.mark.timeout(500)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_what_all_ranks_get_is_right(n):
    slab = SLOT // 4
    numels = {0, 1, n - 1, n, n + 1, 1009, slab - 1, slab, slab + 1, 1 << 18}
    numels |= {ONE_SHOT // 4, ONE_SHOT // 4 + 1, 5 * slab + 7}

    def wrong():
        results = compare(sorted(numels), [torch.float32])
        if n == 2:
            results += compare([3, 40_009], DTYPES, list(COMBINE))
        if n > 1:
            results += compare([1009, 40_009], FLOATS, ROUGH_OPS, rough)
        return results

    assert spawn(wrong, world_size=n, timeout=400) == [[]] * n


# ---- races -------------------------------------------------------------------------


class OnePage(Staging):
    """A planted mistake: what others still read is overwritten."""

    def page(self, turn, like):
        return super().page(0, like)


class EverySecond(Barrier):
    """A planted mistake: only every second barrier waits."""

    every = 2

    def wait(self):
        if self.count % self.every:
            self.count += 1
        else:
            super().wait()


class EveryThird(EverySecond):
    """A planted mistake: two of three barriers do not wait."""

    every = 3


def races(rounds: int, barrier=Barrier, kind=Staging) -> int:
    """Count wrong results of many calls of any size, back to back, at any moment."""
    staging, memory = memories(kind=kind, barrier=barrier)
    n, rank, wrong = staging.size, staging.rank, 0
    slow, common = random.Random(rank), random.Random(0)

    def napping(inputs, op, out):
        if slow.random() < 0.1:
            time.sleep(slow.random() * 2e-3)
        combine(inputs, op, out)

    for number in range(rounds):
        numel = common.choice([1, 100, 5000, 16384, 16385, 40_000, 100_003])
        way = common.choice(["staged", "symmetric"])
        x = torch.arange(numel, dtype=torch.float32) % 1000 + number + rank
        out, right = torch.empty_like(x), n * (x - rank) + n * (n - 1) / 2
        with patch.object(module, "combine", napping):
            if way == "staged":
                staging.all_reduce(out.copy_(x), ReduceOp.SUM)
            else:
                out = placed(memory, x)
                memory.all_reduce(out, ReduceOp.SUM)
        wrong += not torch.equal(out, right)
    dist.barrier()
    return wrong


@pytest.mark.timeout(500)
def test_calls_back_to_back_do_not_disturb_each_other():
    assert sum(spawn(races, 200, world_size=5, timeout=400)) == 0


def own_first(inputs, op, out):
    """A planted mistake: each rank begins with its own numbers."""
    k = dist.get_rank()
    combine([t.clone() for t in [*inputs[k:], *inputs[:k]]], op, out)


def planted() -> tuple[list[str], list[str], list[int]]:
    """On every rank: what is wrong with slices and order; and the races."""
    with patch.object(module, "cuts", forgets_the_rest):
        sums = compare([100_003], [torch.float32])
    with patch.object(module, "combine", own_first):
        order = compare([1009, 40_009], FLOATS, ROUGH_OPS, rough)
    kinds = (Barrier, OnePage), (EverySecond, Staging), (EveryThird, Staging)
    return sums, order, [races(200, *kind) for kind in kinds]


@pytest.mark.timeout(500)
def test_planted_mistakes_are_seen():
    results = spawn(planted, world_size=3, timeout=400)
    sums, order, raced = zip(*results, strict=True)
    assert [len(wrong) for wrong in sums] == [2] * 3
    assert all(len(wrong) > 12 for wrong in order[1:])
    assert all(map(sum, zip(*raced, strict=True))), raced


# ---- errors, and what is left ------------------------------------------------------


def disagree() -> list:
    """On every rank: the first barrier raises; return what has changed all the same."""
    staging, memory = memories()
    changed = []

    def meet():
        staging.barrier.wait()
        raise ValueError("rank 1 means something else")

    for numel in (5, 50_000):
        x = torch.arange(float(numel))
        y = placed(memory, x)
        for call in (
            lambda x=x: staging.all_reduce(x, ReduceOp.SUM, meet),
            lambda y=y: memory.all_reduce(y, ReduceOp.SUM, meet),
        ):
            if not error_of(call).startswith("ValueError: rank 1 means"):
                changed.append("no error")
        if not torch.equal(x, torch.arange(float(numel))) or not torch.equal(x, y):
            changed.append(numel)
        staging.all_reduce(x, ReduceOp.SUM)  # and it can be used after that
        if not torch.equal(x, staging.size * torch.arange(float(numel))):
            changed.append("later")
    return changed


def live() -> tuple:
    """On every rank: where tensors are found, and how long memory is there."""
    staging, memory = memories(room=10_000)
    x = memory.own[4096:8192].view(torch.float32)
    found = [memory.find(t) for t in (x, x[2:], memory.own, torch.ones(3))]
    elsewhere = error_of(partial(memory.all_reduce, torch.ones(3), ReduceOp.SUM))
    x.fill_(1)
    memory.all_reduce(x, ReduceOp.SUM)
    both = mappings()  # the barrier's, the slots, the tensors
    del memory, staging
    one = mappings()
    right = x.sum().item() == 1024 * dist.get_world_size()
    del x
    gc.collect()
    return elsewhere, found, both, one, right, mappings()


def fail() -> str:
    """On every rank: rank 1 fails while it reduces."""
    staging, _ = memories()
    if dist.get_rank() == 1:
        module.combine = None
    return error_of(lambda: staging.all_reduce(torch.ones(100_000), ReduceOp.SUM))


def test_memory_is_found_and_goes_and_errors_are_everyones():
    results = spawn(lambda: (live(), disagree(), fail()), world_size=3)
    elsewhere = "ValueError: the tensor of shape [3] is not in this shared memory"
    lived = (elsewhere, [4096, 4104, 0, None], 3, 1, True, 0)
    assert [facts[:2] for facts in results] == [(lived, [])] * 3
    assert results[1][2].startswith("TypeError")
    assert all("left this shared memory" in results[rank][2] for rank in (0, 2))
