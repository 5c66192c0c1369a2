"""A server on every rank beside ZeRO-1; and no server at all."""

from __future__ import annotations

import pytest
import server_cases as cases
import torch
import torch.distributed as dist
from torch import nn

from ddp_course.launch import spawn
from ddp_course.measure import ByteMeter
from ddp_course.mechanisms.elementwise import NotElementwiseError
from ddp_course.parameter_server import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Server,
    ShardedServer,
    Worker,
    bounded,
    hogwild,
)
from ddp_course.zero import Zero1

STEPS, ADAM = 5, {"lr": 0.01}


def sharded(rule, kind=ShardedServer):
    """Return bytes sent in STEPS steps, weights after them, and the record."""
    model, rank = cases.make_model(), dist.get_rank()
    with ByteMeter() as meter:
        server = kind(model.parameters(), torch.optim.Adam, rule, **ADAM)
        server.pull()
        first = meter.report().total_sent  # the weights that all have already
        for clock in range(STEPS):
            cases.gradient(model, rank, clock)
            server.push()
            server.pull()
        record = server.leave()
        nbytes = meter.report().total_sent
    return nbytes, first, [p.detach() for p in model.parameters()], record


def zero1():
    model, rank = cases.make_model(), dist.get_rank()
    optimizer = Zero1(model.parameters(), torch.optim.Adam, **ADAM)
    with ByteMeter() as meter:
        for clock in range(STEPS):
            optimizer.zero_grad()
            cases.gradient(model, rank, clock)
            optimizer.step()
    return meter.report().total_sent, [p.detach() for p in model.parameters()]


def central():
    """Return the bytes that rank 0 sends and receives as the server of all others."""
    model, rank = cases.make_model(), dist.get_rank()
    with ByteMeter() as meter:
        if rank == 0:
            sgd = torch.optim.SGD(model.parameters(), lr=0.01)
            Server(model.parameters(), sgd, steps=12).serve()
            return meter.report().total_sent, meter.report().total_received
        with Worker(model.parameters()) as worker:
            while worker.pull():
                cases.gradient(model, rank, worker.clock)
                worker.push()
    return None


def both():
    return sharded(SYNCHRONOUS), zero1(), sharded(ASYNCHRONOUS), central()


class SendsAll(ShardedServer):
    """Pushes the whole row to every server."""

    def push(self):
        super().push()
        for worker in self.others:
            worker.port._count_sent(self.row.gradient, worker.server)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sharded_server_moves_what_zero_1_moves(ranks):
    found = spawn(both, world_size=ranks, timeout=40)
    for rank, ((nbytes, _, weights, record), theirs, loose, _) in enumerate(found):
        extra = nbytes - theirs[0]  # one more pull, of what they began with
        assert extra * STEPS * 2 == theirs[0], rank
        for ours, other in zip(weights, theirs[1], strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7)
        assert record.steps == STEPS
        assert loose[-1].gradients == loose[-1].steps == STEPS * ranks
    numel = sum(p.numel() for p in cases.make_model().parameters() if p.requires_grad)
    gradients = 12  # in as many steps; and some that came in vain
    sent, received = found[0][3]
    assert sent >= 4 * numel * gradients and received >= 4 * numel * gradients
    assert sent % (4 * numel) == received % (4 * numel) == 0


def test_a_sharded_server_is_legal_for_nccl_and_one_that_sends_too_much_is_caught():
    def both():
        return sharded(bounded(0)), sharded(SYNCHRONOUS, SendsAll), zero1()

    for ours, wrong, theirs in spawn(both, world_size=3, backend="strict", timeout=40):
        assert (ours[0] - theirs[0]) * STEPS * 2 == theirs[0]
        assert (wrong[0] - theirs[0]) * STEPS * 2 != theirs[0]


class WholeNorm(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm()


def test_an_optimizer_of_whole_tensors_is_refused():
    def refused():
        weight = nn.Parameter(torch.ones(4))
        with pytest.raises(NotElementwiseError):
            ShardedServer([weight], WholeNorm, lr=0.1)

    spawn(refused, world_size=1)


def test_hogwild_loses_little_and_all_see_the_same():
    def count(rows):
        table = nn.Parameter(torch.zeros(rows, 4) + dist.get_rank())
        hogwild([table])
        optimizer = torch.optim.SGD([table], lr=1.0)
        seeded = torch.Generator().manual_seed(dist.get_rank())
        dist.barrier()
        for _ in range(400):
            row = int(torch.randint(rows, (), generator=seeded))
            optimizer.zero_grad()
            (-table[row].sum()).backward()
            optimizer.step()
        dist.barrier()
        return table.detach().clone()

    first, *others = spawn(count, 64, world_size=3)
    assert all(torch.equal(first, other) for other in others)
    assert 0 < first.sum() / 4 <= 3 * 400  # never more than was added
