"""Long chunks travel in pieces: any plan, cut small, on real ranks, is still exact."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from ddp_course.collectives import communicator, hierarchical, runtime
from ddp_course.collectives.catalog import PLANS
from ddp_course.collectives.plan import Plan
from ddp_course.collectives.port import Port
from ddp_course.collectives.runtime import Buffer, pipelined
from ddp_course.launch import spawn

SIZES = [1, 7, 1009, 4099]  # of float64: prime, so no number of ranks divides them
PIECES = [8, 200, 4096]  # bytes
MOST = 60  # messages of a chunk, so that pieces of one number stay with short tensors


class Counting(Port):
    """A port that counts the messages it sends."""

    sent = 0

    def send(self, tensor, peer):
        self.sent += 1
        return super().send(tensor, peer)


def all_reduce_plans(n: int) -> dict[str, Plan]:
    """Return all plans of an all-reduce for n ranks, two nodes of two among them."""
    reduces = {name: make for name, make in PLANS.items() if "all_reduce" in name}
    plans = {name: make(n) for name, make in reduces.items()}
    for name, make in hierarchical.PLANS.items():
        for nodes in range(1, n + 1):
            if n % nodes == 0:
                plans[f"{name}, {nodes} nodes"] = make(nodes, n // nodes)
    return plans


def scratch(numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=torch.float64)


def ignore_after(plan, rank, edges, piece):
    """Plant a mistake: everything is sent at once, whether it is there or not."""
    right = schedule(plan, rank, edges, piece)
    return replace(right, sends=tuple(replace(s, after=0) for s in right.sends))


schedule = runtime.schedule


def wrong_in_pieces(plant=None) -> tuple[list[str], int, int]:
    """On every rank: where a plan in pieces is not exact, and how much it sent.

    Returns the messages that were sent, and the transfers of the plans, beside that.
    """
    runtime.schedule = plant or schedule
    me, n = dist.get_rank(), dist.get_world_size()
    comm, nap, wrong = communicator(), random.Random(me), []
    messages = transfers = 0
    for name, plan in all_reduce_plans(n).items():
        for numel in SIZES:
            for piece in PIECES:
                if 8 * numel / plan.chunks > MOST * piece:
                    continue
                x = torch.arange(numel, dtype=torch.float64) + 1000 * me
                total = n * (x - 1000 * me) + 1000 * (n * (n - 1) // 2)
                port = Counting(comm.group, comm.ranks, comm.rank)
                time.sleep(nap.random() * 2e-3)
                buffer = Buffer.flat(x, plan.chunks)
                pipelined(plan, buffer, port, scratch=scratch, piece=piece)
                if not torch.equal(x, total):
                    wrong.append(f"{name}: {numel} in pieces of {piece} bytes")
                messages += port.sent
                transfers += len(plan.sent_by(me))
    return wrong, messages, transfers


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_all_reduce_is_exact_in_small_pieces(n):
    for wrong, messages, transfers in spawn(wrong_in_pieces, world_size=n):
        assert wrong == []
        assert messages > 3 * transfers  # they were cut, indeed


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_planted_runtime_that_does_not_wait_is_seen(n):
    told = spawn(wrong_in_pieces, ignore_after, world_size=n)
    assert any(wrong for wrong, _, _ in told)


def test_all_plans_are_there():
    assert len(all_reduce_plans(4)) == 4 + 2 * 3
    assert "sharded, 2 nodes" in all_reduce_plans(4)
