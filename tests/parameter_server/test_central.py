"""A server on one rank, workers on the others: every run, replayed, is the same."""

from __future__ import annotations

import itertools
import math
import re
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import server_cases as cases
import torch
from on_ranks import launched
from refusals import refused
from torch import nn

from ddp_course.launch import RankError, spawn
from ddp_course.parameter_server import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Book,
    ParameterRow,
    Server,
    backup,
    bounded,
    replay,
)

TYPES = torch.float32, torch.float64
RULES = [SYNCHRONOUS, ASYNCHRONOUS, bounded(0), bounded(1), backup(1)]
UNDER = [(SYNCHRONOUS, 1), (ASYNCHRONOUS, 1), (backup(1), 2), (bounded(0), 2)]


def check_ages(record) -> None:
    """Count versions again, from nothing but the order of things."""
    version, has, pushed, found = 0, {}, {}, []
    for event in record.events:
        if event.kind == "pull":
            has[event.worker] = version
        if event.kind == "push":
            pushed[event.worker] = has[event.worker]
        if event.kind == "step":
            found += [version - pushed[worker] for worker in event.workers]
            version += 1
    assert record.staleness() == found


def check(case, record, weights) -> None:
    """One process computes the same, bit by bit; and everything was counted."""
    model = cases.make_model()
    optimizer = cases.OPTIMIZERS[case.get("optimizer", "sgd")](model.parameters())
    gradient = lambda worker, clock: cases.gradient(model, worker, clock)  # noqa: E731
    replay(record, model.parameters(), optimizer, gradient)
    for ours, theirs in zip(weights, model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    check_ages(record)
    assert record.steps == case.get("steps", 16)


@pytest.mark.parametrize("backend", ["gloo", "strict"])  # legal for NCCL, too
def test_every_rule_with_several_optimizers_and_workers(backend):
    names = itertools.cycle(cases.OPTIMIZERS)
    todo = [{"rule": rule, "optimizer": next(names)} for rule in RULES]
    if backend == "gloo":
        todo += [{"rule": rule, "optimizer": next(names)} for rule in RULES]
        todo += [{"rule": rule, "workers": [1, 2][:n]} for rule, n in UNDER]
    every = [(case, Server) for case in todo]
    found = spawn(cases.all_of, every, backend=backend)[0]
    for (case, _), (record, weights) in zip(every, found, strict=True):
        check(case, record, weights)
        if case["rule"].synchronous:
            assert set(record.staleness()) == {0}


def test_a_wrong_server_is_caught_and_the_right_one_is_not():
    kinds = [cases.Twice, cases.Forgets, cases.Torn, cases.WrongClock, Server]
    case = {"rule": ASYNCHRONOUS, "steps": 30}
    found = spawn(cases.all_of, [(case, kind) for kind in kinds])[0]
    check(case, *found.pop())
    for record, weights in found:
        with pytest.raises(AssertionError):
            check(case, record, weights)


def check_in_a_few_lines(senders, weights) -> None:
    """Repeat a run of the naive server in one process, in the order of its senders."""
    model = cases.make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    sgd = cases.OPTIMIZERS["sgd"](trained)
    has, clock = dict.fromkeys((1, 2, 3), [p.detach().clone() for p in trained]), {}
    assert sorted(senders) == sorted([1, 2, 3] * cases.PUSHES)
    for worker in senders:
        now = [p.detach().clone() for p in trained]
        for parameter, value in zip(trained, has[worker], strict=True):
            parameter.data.copy_(value)
        sgd.zero_grad()
        cases.gradient(model, worker, clock.setdefault(worker, 0))
        clock[worker] += 1
        for parameter, value in zip(trained, now, strict=True):
            parameter.data.copy_(value)
        sgd.step()
        has[worker] = [p.detach().clone() for p in trained]
    for ours, theirs in zip(weights, model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_server_in_a_few_lines_is_replayed_bit_by_bit():
    check_in_a_few_lines(*spawn(cases.in_a_few_lines)[0])
    with pytest.raises(AssertionError):
        check_in_a_few_lines(*spawn(cases.in_a_few_lines, cases.answers_the_last)[0])


def test_a_worker_with_other_parameters_is_told_so(two_ranks):
    for words in two_ranks["of_another_model"][1]:
        assert "rank 0 serves other parameters than these" in words


def test_an_optimizer_that_fails_is_told():
    def fails():
        def after_step(version):
            raise RuntimeError("of the optimizer")

        return cases.run({"rule": ASYNCHRONOUS, "after_step": after_step})

    with pytest.raises(RankError, match="rank 0: RuntimeError: of the optimizer"):
        spawn(fails, world_size=2)


def test_a_killed_worker_keeps_nobody():
    """With a bound of one clock; chapter 13 kills workers under the other rules."""
    record, _, dead, _ = spawn(cases.one_is_killed, may_fail=[2])
    assert dead.status == "killed"
    assert record.steps == 20
    assert [event.worker for event in record.select("lost")] == [2]
    assert {event.worker for event in record.select("leave")} == {1, 3}


def test_a_silent_worker_may_come_back_and_another_joins_late():
    record, *turns = spawn(cases.slow_and_late)
    assert [event.worker for event in record.select("lost")] == [2]
    joined = [event.worker for event in record.select("join")]
    results = [(event.kind, event.worker) for event in record.events]
    assert [kind for kind, _ in results].index("pull") < results.index(("join", 3))
    assert set(joined) == {1, 2, 3} and joined.count(2) >= 2
    assert all(turn > 4 for turn in turns)


def test_what_cannot_work_is_refused_before_anything_is_sent(two_ranks):
    said = two_ranks["cannot_work"]
    assert "server is 0, which is this rank; the server cannot be its own" in said[0][0]
    assert "rule is 'synchronous'; it can be SYNCHRONOUS" in said[0][1]
    assert "SGD'>; it must be an optimizer of params, such as" in said[0][2]
    assert (
        said[0][3] == "workers or late has 2; they must be ranks of the group, 0 to 1"
    )
    assert "workers or late has -1; they must be ranks of the group" in said[0][4]
    for words in said[1][:2]:
        assert re.fullmatch("server is (5|-1); it must be a rank of .* 0 to 1", words)
    for words in said[1][2:4]:
        assert "push without a pull before it: call pull before each push" in words
    assert said[1][4] == "indices are torch.int32; they must be torch.int64"


def test_a_second_push_after_a_pull_is_refused_and_the_first_counts():
    said = spawn(cases.pushes_twice, world_size=3)
    assert [len(words) for words in said[1:]] == [2, 0]
    for words in said[1]:
        assert "push without a pull before it: call pull before each push" in words


def test_a_server_that_is_silent_is_named():
    def waits():
        model = cases.make_model()
        if torch.distributed.get_rank() == 1:
            cases.Worker(model.parameters(), patience=0.3).pull()
        torch.distributed.recv(torch.zeros(1), 1)

    with pytest.raises(RankError, match="rank 0, which serves .* answered for 0.3 s"):
        spawn(waits, world_size=2)


def test_gradients_are_collected_wherever_they_lie():
    a, b, c = (nn.Parameter(torch.full((2,), x)) for x in (1.0, 2.0, 3.0))
    row = ParameterRow([a, b, c])
    (a * a + b * b + c * c).sum().backward()
    a.grad, b.grad = None, torch.full((2,), 7.0)  # as `zero_grad` and hooks may do
    assert row.collect().tolist() == [0, 0, 7, 7, 6, 6]
    frozen = nn.Parameter(torch.ones(9), requires_grad=False)
    row = ParameterRow([a, frozen, b, a])  # one is tied
    assert row.weights.tolist() == [1, 1, 2, 2]


def test_who_waits_for_the_server_is_not_silent():
    server = SimpleNamespace(changed=threading.Condition(), error=None)
    server.last_call = {1: 0.0}
    server.book, server.lose = Book(ASYNCHRONOUS, [1]), None
    during = Server.run_locked(server, lambda worker: server.last_call[worker], 1)
    assert during == math.inf
    assert 0 < server.last_call[1] < math.inf
    server.run_locked = partial(Server.run_locked, server)
    server.lose = partial(Server.lose, server)
    server.book, server.last_call[2] = Book(ASYNCHRONOUS, [1, 2]), 0.0  # it never came
    server.book.join(1)
    server.patience = 60.0
    Server._remove_silent_workers(server)
    assert [event.kind for event in server.book.events] == ["join"]
    assert server.book.may_pull(1)
    server.book.pull(1)
    server.book.push(1)  # it waits for a step, and that fails
    server.error = RuntimeError("of the optimizer")
    with pytest.raises(RuntimeError, match="of the optimizer"):
        server.run_locked(partial(Server.pull, server), 1)


test_parameters_that_make_no_row_are_refused = refused(
    (lambda: ParameterRow([]), "0 kinds"),
    (lambda: ParameterRow(nn.Linear(1, 1)), "type Linear; .* pass model.parameters"),
    (lambda: ParameterRow([torch.zeros(1), 3]), "of type int"),
    (
        lambda: ParameterRow([nn.Parameter(torch.zeros(2, dtype=t)) for t in TYPES]),
        "2 kinds",
    ),
)

two_ranks = launched(2, cases.of_another_model, cases.cannot_work)
