"""Naive model parallelism: the same training, and N - 1 of N ranks wait."""

from __future__ import annotations

import functools
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from tp_cases import CONFIG, ROWS, batch, model

from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter, EventLog, busy
from ddp_course.model import build_gpt
from ddp_course.tensor_parallel import NaiveModelParallel

WAIT = 0.03  # seconds


def trained(naive: bool = True, steps: int = 5) -> dict[str, object]:
    """On every rank: losses, own states and gradients of each step; bytes; a text."""
    told: dict[str, object] = {"losses": [], "states": [], "gradients": []}
    module = NaiveModelParallel(model("frozen")) if naive else model("frozen")
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, eps=1e-4)
    for step in range(steps):
        optimizer.zero_grad()
        with ByteMeter() as meter:
            if naive:
                loss = module.step(*batch(step))
            else:
                _, loss = module(*batch(step))
                loss.backward()
        named = dict(module.named_parameters())
        told["gradients"].append(
            {n: p.grad for n, p in named.items() if p.grad is not None}
        )
        optimizer.step()
        told["losses"].append(loss.item())
        told["states"].append({n: t.clone() for n, t in module.state_dict().items()})
    told["sent"] = meter.total_sent, meter.total_messages
    return told


@functools.cache
def one_process() -> dict[str, object]:
    """Return the training of one process: a rank, as all have one thread."""
    return spawn(trained, False, world_size=1, output="none", device="cpu")[0]


@pytest.mark.parametrize("n", [1, 3, 4])
def test_the_same_training_as_one_process_bit_for_bit(n):
    alone = one_process()
    ranks = spawn(trained, world_size=n, output="none", device="cpu", timeout=100)
    boundary = ROWS * CONFIG.block_size * CONFIG.d_model * 4
    for r, rank in enumerate(ranks):
        assert rank["losses"] == alone["losses"]
        ends = (r > 0) + (r < n - 1)  # activations to the next, gradients to the last
        assert rank["sent"] == (boundary * ends, ends)
    for what in ("states", "gradients"):
        for step, whole in enumerate(alone[what]):
            parts = [rank[what][step] for rank in ranks]
            assert sum(map(len, parts)) == len(whole)  # no parameter is there twice
            for part in parts:
                for name, tensor in part.items():
                    assert torch.equal(tensor, whole[name]), (what, step, name)


class Waits(Function):
    """Computing, as far as the clock can tell: a rank that sleeps needs no core."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(WAIT)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * WAIT)
        return gradient


class Slow(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return Waits.apply(self.layer(x))


def idle() -> list:
    """On every rank: the events of a step whose layers take equally long."""
    gpt = build_gpt(replace(CONFIG, n_layer=2 * dist.get_world_size() - 2))
    module = NaiveModelParallel(gpt)
    module.layers = [Slow(layer) for layer in module.layers]
    module.step(*batch(0))
    steps = []
    for _ in range(3):
        with EventLog() as log:
            module.step(*batch(1))
        steps.append(log.events)
    return steps


@pytest.mark.parametrize("n", [2, 4])
def test_all_ranks_but_one_are_idle(n):
    ranks = spawn(idle, world_size=n, output="none", timeout=100)
    shares = []
    for events in zip(*ranks, strict=True):
        events = [event for rank in events for event in rank]
        computing = [e for e in events if e.lane == "compute"]
        computing.sort(key=lambda e: e.start)
        assert [e.op for e in computing] == ["forward"] * n + ["backward"] * n
        assert [e.rank for e in computing] == [*range(n), *reversed(range(n))]
        assert len([e for e in events if e.lane == "wait"]) == 2 * (n - 1)
        span = max(e.end for e in computing) - computing[0].start
        shares.append(1 - busy(computing, "compute") / (n * span))
    # Other programs can only add to it, and seldom in all steps.
    assert min(shares) == pytest.approx((n - 1) / n, abs=0.02)
