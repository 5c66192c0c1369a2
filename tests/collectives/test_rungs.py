"""The all-reduces that are read first: right by themselves, and as those by plans."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ddp_course.collectives import (
    naive,
    naive_all_reduce,
    ring,
    ring_all_reduce,
    tree,
    tree_all_reduce,
)
from ddp_course.collectives.endpoint import Endpoint
from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter

REDUCE_SCATTER, EXCHANGE = ring.reduce_scatter, Endpoint.exchange  # as they should be
RUNGS = {
    "naive": (naive.through_rank_0, naive_all_reduce),
    "tree": (tree.along_a_tree, tree_all_reduce),
    "ring": (ring.around_the_ring, ring_all_reduce),
}


def numbers(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers whose sum depends on the order in which they are added."""
    dice = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=dice).to(dtype) * 1000
    return torch.randint(0, 2, (numel,), generator=dice).to(dtype)


def cases(n: int) -> list[tuple[int, torch.dtype]]:
    dtypes = torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool
    numels = 0, 1, n - 1, n + 1, 40_009
    return [(1009, d) for d in dtypes] + [(k, torch.float32) for k in numels]


def differences(group=None, some=None, rungs=tuple(RUNGS)) -> list[str]:
    """On every rank: where a rung differs from the full one, in bits or in messages."""
    wrong, n = [], dist.get_world_size(group)
    for numel, dtype in some or cases(n):
        x = numbers(numel, dtype, dist.get_rank())
        for name, (rung, full) in ((name, RUNGS[name]) for name in rungs):
            results = []
            for all_reduce in (rung, full):
                result = x.clone()
                with ByteMeter() as meter:
                    all_reduce(result, group=group)
                results.append((result, meter.sent, meter.received, meter.messages))
            (a, *metered), (b, *expected) = results
            same = torch.equal(a, b)
            if name == "naive":  # the plan adds in another order
                same = torch.allclose(a, b, rtol=1e-2, atol=100)
            # The naive rung is PyTorch alone, so that no meter sees its messages.
            counted = name == "naive" or not numel or metered == expected
            if not same or not counted:
                wrong.append(f"{name}: {numel} {dtype}")
    return wrong


def with_gaps() -> list[bool]:
    """On every rank: a matrix by columns, every second number, and no dimension."""
    me, n = dist.get_rank(), dist.get_world_size()
    total, right = sum(range(n)), []
    matrix = torch.full((7, 5), float(me))
    for part in (matrix.t()[1:4], matrix[::2, 4], torch.tensor(float(me))):
        ring.around_the_ring(part)
        right.append(bool((part == total).all()))
    return [*right, bool((matrix[:, 0] == me).all())]


def all_of_it() -> tuple[list[str], list[str], list[bool]]:
    """On every rank: in all ranks, in two groups at once, and with gaps."""
    rank, n = dist.get_rank(), dist.get_world_size()
    halves = [[r for r in range(n) if r % 2 == k] for k in (0, 1)]
    mine = [dist.new_group(half) for half in halves][rank % 2]
    return differences(), differences(mine), with_gaps()


@pytest.mark.parametrize("n", [2, 5])  # and one, two and three, in groups
def test_each_rung_gives_the_bits_and_sends_the_messages_of_the_full_one(n):
    results = spawn(all_of_it, world_size=n, output="none", timeout=280)
    assert results == [([], [], [True] * 4)] * n


def adds_one_chunk_further(chunks, endpoint):
    """A planted mistake: what comes from the left is added to another chunk."""
    REDUCE_SCATTER([*chunks[1:], chunks[0]], endpoint)


def sends_to_the_left(self, sends, receives):
    """A planted mistake: right by its numbers, but around the other way."""
    left = [(t, (self.rank - 1) % self.size) for t, _ in sends]
    EXCHANGE(self, left, [(t, (self.rank + 1) % self.size) for t, _ in receives])


MISTAKES = [
    (ring, "reduce_scatter", adds_one_chunk_further),
    (ring, "reduce_scatter", ring.all_gather),  # keeps, and adds nothing
    (Endpoint, "exchange", sends_to_the_left),
]


def planted() -> list[list[str]]:
    """On every rank: see where each mistake shows."""
    found = []
    for mistake in MISTAKES:
        with patch.object(*mistake):  # chunks of one size: no crash
            found.append(differences(None, [(999, torch.float32)], ["ring"]))
    return found


def test_planted_mistakes_in_the_ring_are_seen():
    for rank in spawn(planted, world_size=3, output="none"):
        for wrong in rank:
            assert any(result.startswith("ring") for result in wrong)
