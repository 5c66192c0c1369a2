"""What runs on the ranks, and servers that are wrong."""

from __future__ import annotations

import os
import signal
from unittest import mock

import torch
import torch.distributed as dist
from refusals import said
from torch import nn

from ddp_course.launch.deadlock import default_store
from ddp_course.parameter_server import (
    SYNCHRONOUS,
    Book,
    Record,
    RowServer,
    RowWorker,
    Server,
    Worker,
    bounded,
    naive,
)


def make_model() -> nn.Module:
    """Return a model with a tied and a frozen weight."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 1))
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def gradient(model: nn.Module, worker: int, clock: int) -> None:
    rows = torch.randn(
        8, 6, generator=torch.Generator().manual_seed(97 * worker + clock)
    )
    ((model(rows) - rows.sum(1, keepdim=True)) ** 2).mean().backward()


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.005, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
    "rms": lambda params: torch.optim.RMSprop(params, lr=0.01),
}


def run(case: dict, kind=Server) -> object:
    """Train under one rule; on the server return (record, weights)."""
    model, rank = make_model(), dist.get_rank()
    case = dict(case)
    optimizer, steps = OPTIMIZERS[case.pop("optimizer", "sgd")], case.pop("steps", 16)
    if rank == 0:
        its_optimizer = optimizer(model.parameters())
        server = kind(model.parameters(), its_optimizer, steps=steps, **case)
        return server.serve(), [p.detach().clone() for p in model.parameters()]
    if rank in case.get("workers", [rank]):
        with Worker(model.parameters()) as worker:
            while worker.pull():
                gradient(model, rank, before := worker.clock)
                worker.push()
                assert worker.clock == before + 1
    return None


def all_of(cases: list[tuple[dict, type]]) -> list:
    """Run all cases, one after the other, in one launch."""
    return [run(case, kind) for case, kind in cases]


# ---- the server in a few lines -------------------------------------------------------

PUSHES = 4  # of each worker


def in_a_few_lines(kind=naive.serve) -> object:
    """Train with any-source messages; on rank 0 return (senders, weights)."""
    model, rank = make_model(), dist.get_rank()
    trained = [p for p in model.parameters() if p.requires_grad]
    if rank == 0:
        pushes = PUSHES * (dist.get_world_size() - 1)
        senders = kind(trained, OPTIMIZERS["sgd"](trained), pushes)
        return senders, [p.detach() for p in model.parameters()]
    naive.work(trained, lambda k: gradient(model, rank, k), PUSHES)
    return None


def answers_the_last(params, optimizer, pushes):
    """Plant: a worker gets the weights of before its own step."""
    before = [[p.detach().clone() for p in params]]

    class Late(torch.optim.SGD):
        def step(self):
            before[0] = [p.detach().clone() for p in params]
            super().step()

    late = Late(params, lr=0.005, momentum=0.9)
    original, vector = dist.send, torch.nn.utils.parameters_to_vector

    def send(tensor, worker):
        original(vector(before[0]), worker)

    with mock.patch.object(naive.dist, "send", send):
        return naive.serve(params, late, pushes)


def of_another_model() -> str:
    """Serve and work with models that differ; return what a worker is told."""
    wide = 3 if dist.get_rank() == 0 else 2
    params = [nn.Parameter(torch.ones(wide, 2)), nn.Parameter(torch.ones(2))]
    if dist.get_rank() == 0:
        Server(params, OPTIMIZERS["sgd"](params)).serve()
        return ""
    words = []
    for own in (params, params[1:], [*params, params[1]], [p.double() for p in params]):
        worker = Worker([nn.Parameter(p.detach().clone()) for p in own])
        words.append(said(ValueError, worker.pull))
    worker.leave()
    return words


def cannot_work() -> list[str]:
    """Return what is said of calls that cannot work; nobody sends anything."""
    params = [nn.Parameter(torch.ones(2))]
    if dist.get_rank() == 0:
        optimizer = OPTIMIZERS["sgd"](params)
        return [
            said(ValueError, Worker, params),
            said(ValueError, Server, params, optimizer, "synchronous"),
            said(ValueError, Server, params, torch.optim.SGD),
            said(ValueError, Server, params, optimizer, workers=[1, 2]),
            said(ValueError, Server, params, optimizer, late=[-1]),
        ]
    return [
        said(ValueError, Worker, params, server=5),
        said(ValueError, Worker, params, server=-1),
        said(ValueError, Worker(params).push),
        said(ValueError, RowWorker(width=2).push),
        said(ValueError, RowWorker(width=2).pull, torch.zeros(3, dtype=torch.int32)),
    ]


def pushes_twice() -> list[str] | None:
    """Return what is said of the second push after a pull, by both kinds of worker.

    Rank 2 has not pushed yet: a second gradient of rank 1 would replace the first one.
    """
    table, rank, said_of = nn.Parameter(torch.ones(3, 2)), dist.get_rank(), []
    optimizer, workers = OPTIMIZERS["sgd"]([table]), dist.new_group([1, 2])
    if rank == 0:
        for kind, params in ((Server, [table]), (RowServer, table)):
            record = kind(params, optimizer, rule=SYNCHRONOUS).serve()
            assert record.steps == 1
        return None
    for make in (lambda: Worker([table]), lambda: RowWorker(width=2)):
        with make() as worker:
            wanted = (torch.arange(3),) if isinstance(worker, RowWorker) else ()
            weights = worker.pull(*wanted)
            (table if weights is True else weights).sum().backward()
            if rank == 1:
                worker.push()
                said_of.append(said(ValueError, worker.push))
            dist.barrier(workers)
            if rank == 2:
                worker.push()
    return said_of


# ---- servers that are wrong ----------------------------------------------------------


class Twice(Server):
    """Applies a gradient twice, now and then."""

    def _step(self, taken):
        super()._step(taken)
        if self.book.version == 7:
            self.row.step(self.optimizer, [self.gradients[worker] for worker in taken])


class Forgets(Server):
    """Notes a gradient and does not take it."""

    def _step(self, taken):
        if self.book.version == 7:
            self.book.step(taken)
        else:
            super()._step(taken)


class Torn(Server):
    """Copies half of the weights, lets others step, and copies the other half."""

    def pull(self, worker):
        answer = super().pull(worker)
        self.changed.wait(0.01)
        half = len(self.row.weights) // 2
        self.sent_weights[worker][half:] = self.row.weights[half:]
        return answer


class CountsByWorker(Book):
    """Takes the clock of a worker for the version of its weights."""

    def pull(self, worker):
        super().pull(worker)
        self.base[worker] = self.clock[worker]


class WrongClock(Server):
    def __init__(self, *args, **how):
        super().__init__(*args, **how)
        self.book.__class__ = CountsByWorker


# ---- faults --------------------------------------------------------------------------


def one_is_killed() -> Record | None:
    """Rank 2 dies in its second turn; the others go on, after waiting for that."""
    model, rank = make_model(), dist.get_rank()
    if rank == 0:
        its_optimizer = OPTIMIZERS["sgd"](model.parameters())
        return Server(model.parameters(), its_optimizer, bounded(1), steps=20).serve()
    store = dist.distributed_c10d._get_default_store()
    with Worker(model.parameters()) as worker:
        turn = 0
        while worker.pull():
            if rank == 2 and turn == 1:
                store.set("dies", "now")
                os.kill(os.getpid(), signal.SIGKILL)
            if rank != 2 and turn == 2:
                store.wait(["dies"])
            gradient(model, rank, worker.clock)
            worker.push()
            turn += 1
    return None


class Impatient(Server):
    """Its patience with rank 2 is over as soon as that rank says that it is silent."""

    heard = False

    def _remove_silent_workers(self):
        if not self.heard and default_store().check(["silent"]):
            self.heard = True
            self.last_call[2] -= self.patience
        super()._remove_silent_workers()


# What a rank says in a turn that it begins, and what it waits for then, by rank and
# turn. Rank 1 gets as far as its turn 8 only if nobody waits for rank 2 any more.
SAYS = {
    (1, 0): "has begun",
    (1, 8): "is past the bound",
    (2, 3): "silent",
    (2, 4): "is back",
    (3, 0): "has joined",
}
AWAITS = {(1, 8): ["is back", "has joined"], (2, 3): ["is past the bound"]}


def slow_and_late() -> object:
    """Rank 2 is silent for longer than patience, and comes back; rank 3 joins late.

    The ranks wait for each other in the store, so that all of this happens also on a
    busy machine.
    """
    model, rank, store = make_model(), dist.get_rank(), default_store()
    if rank == 0:
        its_optimizer = OPTIMIZERS["sgd"](model.parameters())
        how = {"late": [3], "steps": 150}
        return Impatient(model.parameters(), its_optimizer, bounded(2), **how).serve()
    if rank == 3:
        store.wait(["has begun"])
    with Worker(model.parameters()) as worker:
        for turn in range(10**6):
            if not worker.pull():
                return turn
            if (rank, turn) in SAYS:
                store.set(SAYS[rank, turn], "now")
            if (rank, turn) in AWAITS:
                store.wait(AWAITS[rank, turn])
            gradient(model, rank, worker.clock)
            worker.push()
    return None
