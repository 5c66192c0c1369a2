"""NCCL's rules on the CPU: what is legal goes through, and what is not is named."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv

from ddp_course import collectives as ours
from ddp_course.collectives import (
    ALGORITHMS,
    CollectiveError,
    halving_doubling,
    hierarchical,
    naive,
    ring,
    tree,
)
from ddp_course.collectives.port import Port
from ddp_course.launch import RankError, spawn
from ddp_course.launch.deadlock import DeadlockError
from ddp_course.launch.strict import StrictError
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.pipeline import Pipeline, gpipe, one_f_one_b
from ddp_course.train import largest_difference, train

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
        "the calls of two ranks run one after the other",
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
    "from anyone": (lambda me, x, group: dist.recv(x, group=group), "who sends"),
    "to itself": (lambda me, x, group: dist.isend(x, me, group), "is to itself"),
}


def errors(cases) -> list[str]:
    """On two ranks: what each case raises, in a group of its own, which breaks."""
    told = []
    for case in cases:
        group = dist.new_group([0, 1])
        try:
            case(dist.get_rank(), torch.ones(4), group)
            told.append("nothing")
        except StrictError as error:
            told.append(str(error))
    return told


def test_illegal_patterns_are_named_on_both_ranks():
    cases = [case for case, _ in ILLEGAL.values()]
    told = spawn(errors, cases, world_size=2, backend="strict", output="none")
    for name, (_, words), *said in zip(ILLEGAL, ILLEGAL.values(), *told, strict=True):
        assert all(words in text for text in said), (name, said)
    # gloo forgives those that would hang or be wrong over NCCL, and need no error
    kind = [crossed, isend_then_recv]
    assert spawn(errors, kind, world_size=2, output="none") == [["nothing"] * 2] * 2


def test_with_tags_ignored_one_message_is_taken_for_another():
    def both() -> list[float]:
        return crossed(dist.get_rank(), None, None)

    ignored = {"STRICT_TAGS": "ignored"}
    ways = {"gloo": {}, "strict": {"backend": "strict", "env": ignored}}
    got = {
        way: spawn(both, world_size=2, output="none", **ways[way])[1] for way in ways
    }
    assert got == {"gloo": [0.0, 1.0], "strict": [1.0, 0.0]}


def send_around() -> None:
    me, x = dist.get_rank(), torch.zeros(2)
    dist.send(x, (me + 1) % 3)
    dist.recv(x, (me - 1) % 3)


def alone_against_a_batch() -> None:
    if dist.get_rank() == 0:
        dist.send(torch.zeros(2), 1)
    else:
        batch((dist.irecv, torch.zeros(2), 0))


@pytest.mark.parametrize(
    ("function", "n", "words"),
    [
        (send_around, 3, "rank 2 at send(float32 [2], dst=0)"),
        (alone_against_a_batch, 2, "rank 1 at a batch of recv(float32 [2], src=0)"),
    ],
)
def test_ranks_that_wait_for_each_other_are_named(function, n, words):
    with pytest.raises(RankError) as caught:
        spawn(function, world_size=n, backend="strict", output="none")
    told = str(caught.value)
    assert DeadlockError.__name__ in told
    assert words in told
    assert "line" in caught.value.reports[0].where


def too_late() -> str:
    rank, limit = dist.get_rank, timedelta(seconds=0.5)
    dist.init_process_group("strict", timeout=limit)
    if rank() == 1:
        time.sleep(1.5)
        return ""
    with pytest.raises(StrictError) as caught:
        dist.all_reduce(torch.zeros(4))
    return str(caught.value)


def test_the_timeout_of_the_group_ends_a_wait():
    told = spawn(too_late, world_size=2, init=False, output="none")[0]
    assert told.startswith("all_reduce(float32 [4], SUM) has waited 0.5 s for rank 1")


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
    told = spawn(legal, world_size=3, backend="strict", output="none")
    same = [True, True, True, 3.0, 6.0, 9.0, 18.0, 2, 9.0, 54.0]
    assert told == [[False, True, True, *same], same, same]


@pytest.mark.timeout(240)
def test_pytorchs_own_classes_run_by_these_rules():
    program = Path(__file__).with_name("strict_program.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command = [*torchrun, "-m", "ddp_course.launch", "--strict", str(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "DDP, FSDP and 1F1B over strict" in ended.stdout, ended.stderr[-3000:]


# ---- the package ---------------------------------------------------------------------


READ_FIRST = (
    naive.through_rank_0,
    tree.along_a_tree,
    ring.around_the_ring,
    halving_doubling.by_halves,
    hierarchical.in_shards,
)


def all_collectives() -> list:
    """On every rank: what each collective of the package returns, and each way."""
    me, n = dist.get_rank(), dist.get_world_size()
    got = []
    for numel in (1, 5, 1009):
        one = torch.arange(numel) + 10 * me
        many = [one + k for k in range(n)]

        def empty():
            return [torch.empty_like(many[0]) for _ in range(n)]  # noqa: B023

        for name, algorithm in ALGORITHMS.items():
            if name != "shared_memory":
                algorithm(total := one.clone())
                got.append(total)
        for algorithm in READ_FIRST:
            algorithm(total := one.clone())
            got.append(total)
        for root in range(n):
            for way in ("naive", "tree"):
                ours.broadcast(told := one.clone(), root, algorithm=way)
                got.append(told)
            ours.reduce(summed := one.clone(), root)
            got.append(summed)
            ours.scatter(part := one.clone(), many if me == root else None, root)
            ours.gather(one, gathered := empty() if me == root else None, root)
            got += [part, *(gathered or [])]
        ours.all_gather(gathered := empty(), one)
        ours.all_gather_single(whole := torch.cat(empty()), one)
        ours.reduce_scatter(part := one.clone(), many)
        ours.reduce_scatter_single(single := one.clone(), torch.cat(many))
        ours.all_to_all_single(rows := torch.cat(empty()), torch.cat(many))
        meanwhile = [one + 1, one * 2]
        for work in [ours.all_reduce(t, async_op=True) for t in meanwhile]:
            work.wait()
        got += [*gathered, whole, part, single, rows, *meanwhile]
        ours.barrier()
    return got


SMALL = GPTConfig(block_size=8, n_layer=2, n_head=4, d_model=16)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


COMPOSED = [
    {"strategy": "zero3", "shard": 2},
    {"strategy": "ddp", "tp": 2},
    {"strategy": "zero1", "pp": 2},
    {"strategy": "zero2", "tp": 2, "pp": 2},
]


def layouts(n: int) -> list[dict]:
    """Return every strategy and schedule; for four ranks, several at once."""
    if n == 4:
        return COMPOSED
    names = ["average", "naive", "flat", "ddp", "pytorch", "zero1", "zero2", "zero3"]
    fit = [{"strategy": name} for name in names + ["tp"] * (n == 2)]
    schedules = SCHEDULES if n == 2 else ("1f1b", "zero_bubble")
    return fit + [{"strategy": "pp", "schedule": name} for name in schedules]


def everything() -> tuple:
    trained = []
    for layout in layouts(dist.get_world_size()):
        history = train(2, 12, SMALL, keep_state=True, clip=0.5, **layout)
        trained.append((history.losses, history.state))
    return all_collectives(), trained


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_package_is_legal_and_gives_the_same_as_over_gloo(n):
    over = {b: spawn(everything, world_size=n, backend=b) for b in ("gloo", "strict")}
    for rank in range(n):
        (mine, trained), (right, expected) = over["strict"][rank], over["gloo"][rank]
        assert all(map(torch.equal, mine, right))
        assert len(mine) == len(right) > 50
        for told, (losses, state), (wanted, reference) in zip(
            layouts(n), trained, expected, strict=True
        ):
            assert losses == pytest.approx(wanted, rel=1e-5), told
            assert largest_difference(state, reference) < 1e-5, told


def planted_at_gloos_pace() -> None:
    """Plant: the messages that suit gloo, posted ahead, one by one."""
    ahead = mock.PropertyMock(return_value=False)
    with mock.patch.object(Port, "strict", ahead, create=True):
        ours.all_reduce(torch.ones(1009))


def naive_pipeline(schedule) -> float:
    model = build_gpt(SMALL, seed=0)
    x = torch.arange(32).view(4, 8)
    return Pipeline(model, schedule(2, 4), [2, 2]).step(x, x).item()


def test_what_suits_gloo_only_is_seen():
    """The naive pipeline sends when it has something: right with GPipe's order only."""

    def all_in_turn() -> tuple:
        told = []
        for schedule in (gpipe, one_f_one_b):
            try:
                told.append(naive_pipeline(schedule))
            except StrictError as error:
                told.append(str(error))
        return told

    told = spawn(all_in_turn, world_size=2, backend="strict", output="none")
    right = spawn(naive_pipeline, gpipe, world_size=2, output="none")[0]
    assert told[0][0] == told[1][0] == right
    assert "each waits for the other" in told[0][1]
    with pytest.raises(RankError, match="each waits for the other"):
        spawn(planted_at_gloos_pace, world_size=2, backend="strict", output="none")


def test_memory_is_not_shared_as_on_gpus():
    def refused() -> None:
        with pytest.raises(CollectiveError, match="share"):
            ALGORITHMS["shared_memory"](torch.ones(4))

    spawn(refused, world_size=2, backend="strict", output="none")
