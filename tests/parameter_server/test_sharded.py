"""A server on every rank beside ZeRO-1; and no server at all."""

from __future__ import annotations

import time
from functools import partial

import pytest
import server_cases as cases
import torch
import torch.distributed as dist
from torch import nn

from ddp_course import collectives
from ddp_course.launch import RankError, spawn
from ddp_course.measure import ByteMeter
from ddp_course.mechanisms.agreement import ReplicaError
from ddp_course.mechanisms.elementwise import NotElementwiseError
from ddp_course.parameter_server import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    RowServer,
    RowWorker,
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
            model.zero_grad()  # as people do: gradients are elsewhere, then
            cases.gradient(model, rank, clock)
            server.push()
            server.pull()
        record = server.leave()
        nbytes = meter.report().total_sent
    return nbytes, first, [p.detach() for p in model.parameters()], record


def zero1():
    model, rank = cases.make_model(), dist.get_rank()
    how = {"collectives": collectives, **ADAM}  # which the meter sees
    optimizer = Zero1(model.parameters(), torch.optim.Adam, **how)
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
            worker.endpoint._count_sent(self.row.gradient, worker.server)


def test_a_sharded_server_moves_what_zero_1_moves():
    ranks = 4
    found = spawn(both, world_size=ranks)
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

    for ours, wrong, theirs in spawn(both, world_size=3, backend="strict"):
        assert (ours[0] - theirs[0]) * STEPS * 2 == theirs[0]
        assert (wrong[0] - theirs[0]) * STEPS * 2 != theirs[0]


class WholeNorm(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad / p.grad.norm()


def test_optimizers_of_whole_tensors_and_other_parameters_are_refused_on_all_ranks():
    def refused():
        weight = nn.Parameter(torch.ones(4))
        with pytest.raises(NotElementwiseError):
            ShardedServer([weight], WholeNorm, lr=0.1)
        other = nn.Parameter(torch.ones(4 + dist.get_rank()))
        with pytest.raises(ReplicaError, match=r"\[\(4,\)\].* on rank 0, \[\(5,\)\]"):
            ShardedServer([other], torch.optim.SGD, lr=0.1)

    spawn(refused, world_size=2)


def test_a_last_step_that_fails_in_a_shard_is_told():
    def fails():
        def after_step(version):
            if dist.get_rank() == 0 and version == 2:
                raise RuntimeError("of the optimizer")

        weight, options = nn.Parameter(torch.ones(4)), {"after_step": after_step}
        how = {"rule": SYNCHRONOUS, "server_options": options, "lr": 0.1}
        server = ShardedServer([weight], torch.optim.SGD, **how)
        for _ in range(2):
            server.pull()
            time.sleep(0.3 * dist.get_rank())  # rank 0 leaves before this step
            server.push()
        server.leave()

    with pytest.raises(RankError, match="rank 0: RuntimeError: of the optimizer"):
        spawn(fails, world_size=2, output="none")


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


# ---- rows of a table -----------------------------------------------------------------

TABLE, WIDTH = 1000, 8


def batch(worker: int, clock: int) -> torch.Tensor:
    """Return indices, one of them twice, and one that all workers have."""
    return torch.tensor([[7, 7, 10 * worker], [clock, 3 * clock, 900 + worker]])


class LastWins(RowServer):
    """Where several touched a row, takes the gradient of one."""

    def apply(self, taken):
        for worker in taken[:-1]:
            twice = (self.pulled[worker][:, None] == self.pulled[taken[-1]]).any(1)
            self.gradients[worker][twice] = 0.0
        super().apply(taken)


def tables(kinds):
    found, rank = [], dist.get_rank()
    for kind, optimizer in kinds:
        with ByteMeter() as meter:
            if rank == 0:
                torch.manual_seed(0)
                table = nn.Parameter(torch.randn(TABLE, WIDTH))
                its_optimizer = optimizer([table])
                kind(table, its_optimizer, rule=SYNCHRONOUS, steps=STEPS).serve()
                found.append((table.detach(), meter.report()))
            else:
                with RowWorker(WIDTH) as worker:
                    while (x := worker.pull(batch(rank, worker.clock))) is not None:
                        (x**2).sum().backward()
                        worker.push()
    return found


def alone(optimizer) -> tuple[torch.Tensor, int, int]:
    """Return the table after as many steps in one process, and the bytes both ways."""
    torch.manual_seed(0)
    table = nn.Parameter(torch.randn(TABLE, WIDTH))
    its_optimizer, indices, vectors = optimizer([table]), 0, 0
    for clock in range(STEPS + 1):  # in the last pull indices are sent in vain
        batches = torch.stack([batch(worker, clock) for worker in (1, 2)])
        rows = sum(len(each.unique()) for each in batches)
        indices += 8 * rows
        if clock < STEPS:
            looked_up = nn.functional.embedding(batches, table, sparse=True)
            its_optimizer.zero_grad()
            ((looked_up**2).sum() / 2).backward()
            with torch.sparse.check_sparse_tensor_invariants():
                its_optimizer.step()
            vectors += 4 * WIDTH * rows
    return table.detach(), vectors, vectors + indices


def test_only_rows_that_are_touched_are_sent():
    names = ("SGD", "Adagrad", "SparseAdam")
    optimizers = [partial(getattr(torch.optim, name), lr=0.1) for name in names]
    kinds = [(RowServer, optimizer) for optimizer in optimizers]
    wrong_one = (LastWins, optimizers[0])
    *found, (wrong, _) = spawn(tables, [*kinds, wrong_one], world_size=3)[0]
    for (ours, report), optimizer in zip(found, optimizers, strict=True):
        table, sent, received = alone(optimizer)
        torch.testing.assert_close(ours, table, rtol=1e-5, atol=1e-6)
        assert (report.total_sent, report.total_received) == (sent, received)
        assert sent < table.nbytes / 10
    assert not torch.allclose(wrong, alone(optimizers[0])[0], rtol=1e-3)
