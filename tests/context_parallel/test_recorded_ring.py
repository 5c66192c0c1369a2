"""The ring's events, waiting in place of computing, and PyTorch's ring as an oracle."""

import pytest
import torch
import torch.distributed as dist

from ddp_course.bench.attention import PAIRS, measured, waited_step, waiting
from ddp_course.context_parallel.assignment import assign
from ddp_course.context_parallel.pytorch import pytorch_ring
from ddp_course.context_parallel.ring import Ring
from ddp_course.launch import Link, Links, spawn

N, C = 4, 64  # ranks, and positions of each
FIRST, LATER = (
    0.75 * C * C,
    0.5 * C * C,
)  # pairs of zigzag's steps, hidden ones included
LINKS = Links(inside=Link(0.0, 20e6))


def ring_of_pytorch():
    """Return the largest differences between PyTorch's ring and ours, by method."""
    n, rank, length = dist.get_world_size(), dist.get_rank(), 48
    assigned = assign(length, n)
    at = [i for some in assigned[rank] for i in some]
    random = torch.Generator().manual_seed(0)
    *qkv, dout = (torch.randn(2, 4, length, 8, generator=random)[:, :, at]
                  for _ in range(4))  # fmt: skip
    ways = [Ring(assigned), pytorch_ring, lambda *qkv: pytorch_ring(*qkv, "allgather")]
    found = []
    for way in ways:
        parts = [x.clone().requires_grad_() for x in qkv]
        out = way(*parts)
        out.backward(dout)
        found.append([out.detach(), *(x.grad for x in parts)])
    return [
        max(float((a - b).abs().max()) for a, b in zip(found[0], its, strict=True))
        for its in found[1:]
    ]


def test_spawn_pytorchs_ring_has_our_outputs_and_gradients():
    for differences in spawn(ring_of_pytorch, world_size=3, output="none"):
        assert max(differences) < 1e-5


def test_spawn_a_zigzag_step_is_recorded():
    run = {"world_size": N, "links": LINKS, "output": "none"}
    for events in spawn(waited_step, "zigzag", 0.01, **run):
        computes = [e for e in events if e.lane == "compute"]
        assert [e.detail["pairs"] for e in computes] == 2 * [FIRST, *3 * [LATER]]
        assert [e.op for e in computes] == 4 * ["forward"] + 4 * ["backward"]
        sends = [e for e in events if e.op == "send"]
        u = 2 * 12 * C * 12 * 4
        assert [e.nbytes for e in sends] == 9 * [u]  # 3 forward, 6 backward
        # Keys and values are launched before the computing that hides them.
        for send, compute in zip(sends[:3], computes[:3], strict=True):
            assert send.start < compute.start
        assert len([e for e in events if e.op == "wait"]) == 6
        step = measured(events)
        assert step.compute <= step.step
        assert sum(e.seconds for e in computes) == pytest.approx(step.compute)


def test_spawn_the_busiest_rank_of_a_plain_ring_computes_all_blocks():
    run = {"world_size": N, "output": "none"}
    found = spawn(waited_step, "contiguous", 0.0, **run)
    pairs = [
        sum(e.detail["pairs"] for e in its if e.lane == "compute") for its in found
    ]
    assert pairs == [2 * (rank + 1) * C * C for rank in range(N)]


def test_spawn_the_bench_compares_a_step_with_its_work_and_with_a_plain_ring():
    hidden, shorter = waiting("some case", 0.5, 0.02, 1)
    assert (hidden["denominator"], shorter["denominator"]) == tuple(
        p.denominator for p in PAIRS[-2:]
    )
    assert hidden["ours"] >= hidden["theirs"]  # no step is shorter than its work
    assert hidden["paired"] == hidden["ratio"]
