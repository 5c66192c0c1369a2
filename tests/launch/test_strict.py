"""NCCL's rules on the CPU: what is legal goes through, and what is not is named."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from everything import (
    COMPOSED,
    SMALL,
    all_collectives,
    differences,
    everything,
    found,
    layouts,
)
from on_ranks import error_of, launched
from torch import nn
from torch.distributed import P2POp, batch_isend_irecv
from torch.nn.parallel import DistributedDataParallel

from ddp_course import collectives as ours
from ddp_course.collectives import ALGORITHMS, rooted
from ddp_course.collectives.endpoint import Endpoint
from ddp_course.launch import RankError, spawn
from ddp_course.launch.deadlock import DeadlockError
from ddp_course.launch.strict import StrictError, StrictWork
from ddp_course.launch.strict_rules import STUCK
from ddp_course.model import build_gpt, cross_entropy
from ddp_course.pipeline import SCHEDULES, Pipeline, gpipe, one_f_one_b
from ddp_course.spec import DATA_PARALLEL, OUTER

# ---- what is illegal -----------------------------------------------------------------


def batch(*parts) -> None:
    for work in batch_isend_irecv([P2POp(*part) for part in parts]):
        work.wait()


def isend_then_recv(me, x, group):
    sent = dist.isend(x, 1 - me, group)
    dist.recv(torch.empty(4), 1 - me, group)
    sent.wait()


def crossed(me, x, group):
    """Return what rank 1 takes for the messages with the tags 0 and 1."""
    call = dist.irecv if me else dist.isend
    tensors = torch.tensor([[0.0], [1.0]]) if me == 0 else torch.empty(2, 1)
    tags = [1, 0] if me else [0, 1]
    for work in [call(tensors[tag], 1 - me, group, tag) for tag in tags]:
        work.wait()
    return tensors.flatten().tolist()


def unequal_counts(me, x, group):
    if me:
        dist.recv(torch.empty(3), 0, group)
    else:
        dist.send(x, 1, group)


def swapped_order(me, x, group):
    calls = [
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.broadcast(x, 0, group),
    ]
    for call in calls if me else calls[::-1]:
        call()


def unequal_batches(me, x, group):
    if me:
        batch((dist.irecv, torch.empty(4), 0, group))
        batch((dist.irecv, torch.empty(4), 0, group))
    else:
        batch((dist.isend, x, 1, group), (dist.isend, x, 1, group))


ILLEGAL = {  # what two ranks do -> what the error says, on both of them
    "isend, recv, wait": (
        isend_then_recv,
        "rank 0 calls send(float32 [4], dst=1), rank 1 calls send(float32 [4], dst=0): "
        "two sends or two receives never match",
    ),
    "both receive first": (
        lambda me, x, group: dist.recv(x, 1 - me, group),
        "rank 0 calls recv(float32 [4], src=1), rank 1 calls recv(float32 [4], src=0)",
    ),
    "crossed tags": (crossed, "src=0, tag=1): NCCL has no tags"),
    "counts of a message": (unequal_counts, "recv(float32 [3], src=0): NCCL does not"),
    "types": (
        lambda me, x, group: dist.all_reduce(x.double() if me else x, group=group),
        "all_reduce(float32 [4], SUM), rank 1 calls all_reduce(float64 [4], SUM)",
    ),
    "counts": (
        lambda me, x, group: dist.all_reduce(x[: 4 - me], group=group),
        "all_reduce(float32 [3], SUM): NCCL does not compare counts",
    ),
    "operations": (
        lambda me, x, group: dist.all_reduce(
            x, [dist.ReduceOp.SUM, dist.ReduceOp.MAX][me], group
        ),
        "rank 1 calls all_reduce(float32 [4], MAX): NCCL does not compare operations",
    ),
    "roots": (
        lambda me, x, group: dist.broadcast(x, me, group),
        "broadcast(float32 [4], root 1): NCCL does not compare roots",
    ),
    "order": (swapped_order, "must make the same calls in the same order"),
    "unequal batches": (unequal_batches, "each send to a rank must meet its receive"),
    "unequal all-to-all": (
        lambda me, x, group: dist.all_to_all_single(
            torch.empty(4), x, [2, 2], [1, 3] if me else [2, 2], group
        ),
        "all_to_all_single(float32 [4]): NCCL does not compare counts",
    ),
    "strided": (
        lambda me, x, group: dist.all_reduce(x.view(2, 2)[:, 0], group=group),
        "tensors must be contiguous; one has shape [2] and stride [2]",
    ),
    "bits": (
        lambda me, x, group: dist.all_reduce(x.int(), dist.ReduceOp.BXOR, group),
        "NCCL has no BXOR",
    ),
    "from anyone": (lambda me, x, group: dist.recv(x, group=group), "which rank sends"),
    "to itself": (
        lambda me, x, group: dist.isend(x, me, group),
        "to itself; copy the tensor",
    ),
}


def errors(cases) -> list[str]:
    """On two ranks: what each case raises, in a group of its own, which breaks."""
    collected = []
    for case in cases:
        args = dist.get_rank(), torch.ones(4), dist.new_group([0, 1])
        collected.append(error_of(partial(case, *args)))
    return collected


def illegal() -> list[str]:
    return errors(case for case, _ in ILLEGAL.values())


def forgiven() -> list[str]:
    return errors([crossed, isend_then_recv])


def test_illegal_patterns_are_named_on_both_ranks(by_strict, by_gloo):
    for (name, (_, words)), *said in zip(
        ILLEGAL.items(), *by_strict["illegal"], strict=True
    ):
        assert all(words in text for text in said), (name, said)
        assert all(text.startswith("StrictError: ") for text in said), (name, said)
    # gloo forgives those that would hang or be wrong over NCCL, and need no error
    assert by_gloo["forgiven"] == [["no error"] * 2] * 2


def with_tags() -> list[float]:
    return crossed(dist.get_rank(), None, None)


def test_with_tags_ignored_one_message_is_taken_for_another(by_gloo):
    how = {"backend": "strict", "env": {"STRICT_TAGS": "ignored"}}
    ignored = spawn(with_tags, world_size=2, output="none", **how)
    assert by_gloo["with_tags"][1] == [0.0, 1.0] and ignored[1] == [1.0, 0.0]


def send_around() -> None:
    me, x = dist.get_rank(), torch.zeros(2)
    dist.send(x, (me + 1) % 3)
    dist.recv(x, (me - 1) % 3)


def alone_against_a_batch() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(2), 1)
    else:
        batch((dist.irecv, torch.zeros(2), 0))


def groups_in_turn() -> None:
    groups = [dist.new_group(), dist.new_group()]
    for group in groups[:: 1 - 2 * dist.get_rank()]:
        dist.all_reduce(torch.zeros(2), group=group)


@pytest.mark.parametrize(
    ("function", "n", "words", "why"),
    [
        (send_around, 3, "rank 2 at send(float32 [2], dst=0)", ""),
        (alone_against_a_batch, 2, "1 at a batch of recv(float32 [2], src=0)", "alone"),
        (groups_in_turn, 2, "rank 1 at all_reduce(float32 [2], SUM)", "groups"),
    ],
)
def test_ranks_that_wait_for_each_other_are_named(function, n, words, why):
    with pytest.raises(RankError) as caught:
        spawn(function, world_size=n, backend="strict", output="none")
    error = str(caught.value)
    assert DeadlockError.__name__ in error
    assert words in error
    assert [name for name, text in STUCK.items() if text in error] == [why] * bool(why)
    assert "line" in caught.value.reports[0].where


def too_late() -> list[str]:
    """On two ranks: what rank 0 is told, as rank 1 does not come, and then ends."""
    dist.init_process_group("strict", timeout=timedelta(minutes=5))
    groups = [dist.new_group(), dist.new_group()]
    models = [DistributedDataParallel(nn.Linear(4, 1), process_group=g) for g in groups]
    backwards = [lambda m=m: m(torch.ones(4)).backward() for m in models]
    for backward in 2 * backwards:  # in the first, PyTorch's DDP makes new buckets
        backward()
    # Up to here, on a busy machine, too, nobody was late.
    short = dist.new_group(timeout=timedelta(seconds=2))
    groups[0].timeout, key = short.timeout, "rank 0 has been told twice"
    store = dist.distributed_c10d._get_default_store()
    assert dist.group.WORLD.timeout == 300
    if dist.get_rank() == 1:
        store.wait([key], timedelta(seconds=200))
        time.sleep(1)
        os._exit(0)
    collected = []
    for call in (lambda: dist.all_reduce(torch.zeros(4), group=short), *backwards):
        if len(collected) == 2:
            store.set(key, "")
        with pytest.raises((StrictError, RuntimeError)) as caught:
            call()
        collected.append(str(caught.value))
    return collected


def test_who_comes_too_late_or_has_ended_is_named():
    """In the host's wait, and in that of C++."""
    how = {"world_size": 2, "init": False, "check": False, "may_fail": [1]}
    ranks = spawn(too_late, output="none", **how)
    alone, late, ended = ranks[0].value
    words = "SUM) has waited 2 s for rank 1, in the group of ranks [0, 1]"
    assert alone == f"all_reduce(float32 [4], {words}"
    assert f"StrictError: all_reduce(float32 [5], {words}" in late
    assert "rank 0 calls all_reduce(float32 [5], SUM), rank 1 has ended" in ended


def test_a_wait_may_end_before_the_stream_has_begun():
    group = mock.Mock(timeout=60.0, ranks=[0, 1])
    stream = SimpleNamespace(group=group, head=None)
    work = StrictWork(stream, "send(float32 [2], dst=1)", {}, lambda: None)
    with pytest.raises(
        StrictError, match=r"^send\(.*\) has waited 0.01 s for its data"
    ):
        work.wait(timedelta(milliseconds=10))


# ---- what is legal -------------------------------------------------------------------


def legal() -> list:
    """On three ranks: what NCCL allows, and what comes of it."""
    me, n = dist.get_rank(), dist.get_world_size()
    right, left = (me + 1) % n, (me - 1) % n
    x, store = torch.full((2,), float(me)), dist.distributed_c10d._get_default_store()
    got = []
    # A send lasts until it is received.
    if me == 0:
        sent = dist.isend(x, 1)
        time.sleep(0.1)
        got.append(sent.is_completed())
        store.set("received", "now")
        got += [sent.wait(), sent.is_completed()]
    elif me == 1:
        store.wait(["received"])
        dist.recv(torch.empty(2), 0)
    # In a batch all go round at once, whichever is named first; complex numbers, too.
    for kind in (torch.float32, torch.complex64):
        y = torch.empty(2, dtype=kind)
        parts = [(dist.isend, x.to(kind), right), (dist.irecv, y, left)]
        batch(*parts[:: 1 if me else -1])
        got.append(y[0].real.item() == left)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as works:
        dist.isend(x, right)
        dist.irecv(y := torch.empty(2), left)
    works.wait()
    got.append(y[0].item() == left)
    with dist._coalescing_manager():
        for tensor in (a := x.clone(), b := x + 1):
            dist.all_reduce(tensor)
    got += [a[0].item(), b[0].item()]
    # A work that C++ waits for; objects; a group of some ranks; images.
    works = [dist.all_reduce(a, async_op=True), dist.all_reduce(b, async_op=True)]
    got += [w.get_future().wait()[0][0].item() for w in works]
    dist.all_gather_object(shown := [None] * n, {"rank": me})
    pair = dist.new_group([0, 2])
    if me != 1:
        dist.all_reduce(a, dist.ReduceOp.AVG, pair)
    images = torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last)
    dist.all_reduce(images)
    return [*got, shown[2]["rank"], a[0].item(), images.sum().item()]


def test_what_is_legal_goes_through():
    results = spawn(legal, world_size=3, backend="strict", output="none")
    same = [True, True, True, 3.0, 6.0, 9.0, 18.0, 2, 9.0, 54.0]
    assert results == [[False, True, True, *same], same, same]


@pytest.mark.timeout(600)
def test_pytorchs_own_classes_run_by_these_rules():
    program = Path(__file__).with_name("strict_program.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "ddp_course.launch", "--strict", str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert "DDP, FSDP and 1F1B over strict" in ended.stdout, ended.stderr[-3000:]


# ---- the package ---------------------------------------------------------------------


def odd_layouts() -> list[dict]:
    """Return those in which three ranks exchange otherwise than two."""
    return [layout for layout in layouts(3) if {"zero", "schedule"} & layout.keys()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_package_is_legal_and_gives_the_same_as_over_gloo(n):
    scaled = {"zero": 2, "tp": 2, "precision": "fp16"}
    some = {2: layouts(2), 3: odd_layouts(), 4: [*COMPOSED, scaled]}[n]
    over = {
        backend: spawn(everything, some, world_size=n, backend=backend, timeout=400)
        for backend in ("gloo", "strict")
    }
    assert [differences(*both) for both in zip(*over.values(), strict=True)] == [[]] * n


def test_what_is_run_by_these_rules_is_all_there_is():
    """A collective is found by its arguments; a strategy by its name."""
    names = {name.split(".")[-1] for name in found()}
    ours_are = {name for name, f in vars(ours).items() if isfunction(f)}
    others = {"communicator", "meeting", "quick_exchange"}
    assert ours_are - others <= names and len(ours_are) == 15
    kinds = {layout.get("data_parallel") for layout in layouts(2)} - {None}
    assert kinds == {*DATA_PARALLEL}
    assert {layout.get("outer") for layout in layouts(2)} - {None} == {*OUTER}
    schedules = {layout.get("schedule") for layout in layouts(2)} - {None}
    assert schedules == {*SCHEDULES}


def planted_reduce(tensor, dst=0, op=None, group=None, async_op=False):
    """Plant: a reduce that does nothing."""


def without_reduce() -> list[str]:
    trained = {"no matter how": ([0.0], {"weight": torch.zeros(1)})}
    right = all_collectives(), trained
    planted_reduce.__module__ = rooted.__name__
    with mock.patch.object(rooted, "reduce", planted_reduce):
        return differences((all_collectives(), trained), right)


def test_a_collective_that_gives_something_else_is_named(by_gloo):
    results = by_gloo["without_reduce"]
    assert {name.split(",")[0] for name in results[0]} == {"rooted.reduce"}
    assert differences(({}, {}), ({}, {})) == ["nothing was run"]


def planted_at_gloos_pace() -> None:
    """Plant: the messages that suit gloo, posted ahead, one by one."""
    ahead = mock.PropertyMock(return_value=False)
    with mock.patch.object(Endpoint, "strict", ahead, create=True):
        ours.all_reduce(torch.ones(1009))


def naive_pipeline(schedule) -> float:
    model = build_gpt(SMALL, seed=0)
    x = torch.arange(32).view(4, 8)
    form = 8, SMALL.d_model
    pipeline = Pipeline(model, schedule(2, 4), [2, 2], form, cross_entropy)
    return pipeline.step(x, x).item()


def naive_gpipe() -> float:
    return naive_pipeline(gpipe)


def both_schedules() -> tuple[float, str]:
    return naive_gpipe(), error_of(lambda: naive_pipeline(one_f_one_b))


def test_what_suits_gloo_only_is_seen(by_gloo):
    """The naive pipeline sends when it has something: right with GPipe's order only."""
    results = spawn(both_schedules, world_size=2, backend="strict", output="none")
    right = by_gloo["naive_gpipe"][0]
    assert results[0][0] == results[1][0] == right
    assert "two sends or two receives never match" in results[0][1]
    with pytest.raises(RankError, match="two sends or two receives never match"):
        spawn(planted_at_gloos_pace, world_size=2, backend="strict", output="none")


def in_shared_memory() -> str:
    return error_of(lambda: ALGORITHMS["shared_memory"](torch.ones(4)))


def test_memory_is_not_shared_as_on_gpus(by_strict):
    for result in by_strict["in_shared_memory"]:
        assert result.startswith("CollectiveError: ") and "share" in result


by_strict = launched(2, in_shared_memory, illegal, backend="strict")
by_gloo = launched(2, forgiven, with_tags, naive_gpipe, without_reduce)
