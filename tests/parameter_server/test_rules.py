"""Who waits for whom: the ledger on thousands of imagined runs, and replays of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

from ddp_course.parameter_server import (
    ASYNCHRONOUS,
    SYNCHRONOUS,
    Book,
    Record,
    Rule,
    backup,
    bounded,
    replay,
    simulate_run,
)

SECONDS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def check_bounded(run, bound: int, workers: int) -> None:
    """At clock c a worker has all of the clocks below c - s, and none from c + s on."""
    clock, inside, waiting = dict.fromkeys(range(1, workers + 1), 0), set(), {}
    for event in run.events:
        if event.kind == "push":
            waiting[event.worker] = event.worker, clock[event.worker]
            clock[event.worker] += 1
        inside |= {waiting[worker] for worker in event.workers}
        if event.kind == "pull":
            c = clock[event.worker]
            assert c - min(clock.values()) <= bound
            needed = set(itertools.product(clock, range(c - bound)))
            assert needed <= inside
            assert all(
                version < c + bound or w == event.worker for w, version in inside
            )


@settings(max_examples=60)
@given(SECONDS, st.integers(0, 3))
def test_nobody_sees_what_is_too_old_or_too_new(seconds, bound):
    run = simulate_run(bounded(bound), seconds, 40)
    check_bounded(run, bound, len(seconds))
    assert run.steps == run.gradients == 40
    everybody = simulate_run(SYNCHRONOUS, seconds, 8)
    assert set(everybody.staleness()) == {0}
    assert everybody.gradients == 8 * len(seconds)


class Runs(Book):
    """Lets everybody go on at once."""

    def may_pull(self, worker):
        return worker not in self.waiting


class Steps(Book):
    """Steps at once, whoever has yet to pull."""

    def ready(self):
        return list(self.waiting)[:1]


def check_hidden(kind) -> None:
    """What rank 1 has computed at clock 0 is not for rank 2's eyes at clock 0."""
    book = kind(bounded(0), expected=[1, 2])
    book.join(1)
    book.join(2)
    book.pull(1)
    book.push(1)
    assert book.ready() == []
    book.pull(2)
    assert book.ready() == [1]


def test_a_ledger_that_forgets_the_bound_is_caught(monkeypatch):
    check_hidden(Book)
    with pytest.raises(AssertionError):
        check_hidden(Steps)
    monkeypatch.setattr("ddp_course.parameter_server.runs.Book", Runs)
    with pytest.raises(AssertionError):
        check_bounded(simulate_run(bounded(0), [1, 2, 5], 40), 0, 3)


def by_own_clock(run) -> list[int]:
    """Staleness from the wrong clock: how often the worker itself has computed."""
    clock = {push.worker: [] for push in run.select("push")}
    for push in run.select("push"):
        clock[push.worker].append(push.clock)
    return [
        s.version - 1 - clock[w].pop(0) for s in run.select("step") for w in s.workers
    ]


@pytest.mark.parametrize("workers", range(1, 9))
def test_equal_workers_are_stale_by_all_others(workers):
    run = simulate_run(ASYNCHRONOUS, [1.0] * workers, 40)
    assert set(run.staleness()[workers:]) == {workers - 1}
    if workers > 1:
        assert set(by_own_clock(run)[workers:]) != {workers - 1}


def test_a_straggler_is_stale_and_backup_workers_do_not_wait_for_it():
    run = simulate_run(ASYNCHRONOUS, [1.0, 1.0, 5.0], 300)
    assert max(run.staleness()) == 10
    run = simulate_run(backup(1), [1.0, 1.0, 5.0], 100)
    assert {step.workers for step in run.select("step")} == {(1, 2)}
    assert {drop.worker for drop in run.select("drop")} == {3}
    assert [drop.version for drop in run.select("drop")][:3] == [0, 5, 10]
    assert run.seconds == 100
    assert simulate_run(backup(1), [1.0], 3).steps == 3  # nobody is left to be spared


def test_who_comes_late_is_as_far_as_the_slowest_and_who_is_gone_keeps_nobody():
    book = Book(bounded(1), expected=[1, 2])
    book.join(1)
    assert not book.may_pull(1)  # rank 2 is missing
    book.join(2)
    for worker in (1, 2, 1, 1):
        book.pull(worker)
        book.push(worker)
        if taken := book.ready():
            book.step(taken)
    assert not book.may_pull(1)
    book.join(3)
    assert book.clock[3] == 1
    book.remove(2, "lost")
    book.remove(3)
    book.step(book.ready())
    assert book.may_pull(1) and not book.empty
    book.remove(1)
    assert book.empty


def test_who_never_comes_keeps_nobody_and_gradients_are_added_by_rank():
    book = Book(SYNCHRONOUS, expected=[1, 2, 3])
    book.join(2)
    book.join(1)
    assert not book.may_pull(1)
    book.remove(3, "lost")  # it was expected, and was never here
    for worker in (2, 1):
        assert book.may_pull(worker)
        book.pull(worker)
        book.push(worker)
    assert book.ready() == [1, 2]


def test_after_the_last_step_nothing_counts():
    late = itertools.chain([0.0] * 4, [1.0] * 3, [3.0] * 9)  # made, joined, pulled
    book = Book(bounded(1), [1, 2, 3], steps=1, now=lambda: next(late))
    for act in (book.join, book.pull):
        for worker in (1, 2, 3):
            act(worker)
    book.push(1)
    book.push(2)
    book.step(book.ready())
    book.push(3)
    assert book.done and book.ready() == []
    assert Record(tuple(book.events)).seconds == 2.0
    assert [event.kind for event in book.events][-3:] == ["push", "step", "drop"]


def test_a_last_gradient_counts_although_its_worker_has_left():
    book = Book(SYNCHRONOUS, expected=[1, 2])
    for worker in (1, 2):
        book.join(worker)
        book.pull(worker)
    book.push(1)
    book.remove(1)
    assert book.ready() == []  # rank 2 still computes
    book.push(2)
    assert book.ready() == [1, 2]


test_what_is_no_rule_and_what_is_no_run_is_refused = refused(
    (lambda: Rule(spare=-1), "spare"),
    (lambda: Rule(spare=1.5), "spare is 1.5; it must be a whole number of workers"),
    (lambda: Book("synchronous"), "rule is 'synchronous'; it can be SYNCHRONOUS, ASYN"),
    (lambda: Rule(bound=-1), "bound"),
    (lambda: Rule(bound=math.nan), "bound"),
    (lambda: simulate_run(ASYNCHRONOUS, [], 1), "above 0"),
    (lambda: simulate_run(ASYNCHRONOUS, [1.0, 0.0], 1), "above 0"),
    (lambda: simulate_run(ASYNCHRONOUS, [1.0], 0), "above 0"),
)


# ---- replays of what nobody has run --------------------------------------------------


def replayed(rule, lr=0.25, seconds=(1, 2, 5), steps=12):
    """Weights after a run with gradients of small whole numbers: sums are exact."""
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def gradient(worker, clock):
        target = torch.arange(4.0) * worker + clock % 3
        (weight * target).sum().backward()

    run = simulate_run(rule, seconds, steps)
    replay(run, [weight], torch.optim.SGD([weight], lr=lr), gradient)
    return weight.detach()


def test_bounded_by_0_is_synchronous():
    together = replayed(SYNCHRONOUS, lr=0.75)
    assert torch.equal(replayed(bounded(0), lr=0.25, steps=36), together)
    assert not torch.equal(replayed(ASYNCHRONOUS, lr=0.25, steps=36), together)


def test_synchronous_is_one_process():
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    for clock in range(12):
        optimizer.zero_grad()
        targets = [torch.arange(4.0) * worker + clock % 3 for worker in (1, 2, 3)]
        (weight * torch.stack(targets).mean(0)).sum().backward()
        optimizer.step()
    assert torch.equal(replayed(SYNCHRONOUS), weight)
