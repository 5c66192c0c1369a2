"""Long messages travel in pieces: the same sums, and each piece waits for its turn."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from on_ranks import launched

from ddp_course import collectives as ours
from ddp_course.collectives import (
    catalog,
    halving_doubling,
    halving_doubling_all_reduce,
    hierarchical,
    hierarchical_all_reduce,
    naive_all_reduce,
    ring_all_reduce,
    runtime,
    tree_all_reduce,
)
from ddp_course.collectives.call import Collective
from ddp_course.collectives.reduction import ReduceOp
from ddp_course.collectives.runtime import PIECE, RankPieces
from ddp_course.launch import here, spawn
from ddp_course.measure import ByteMeter

SMALL = 1000  # bytes of a piece: 250 numbers of 4 bytes, 125 of 8
PLANS = {  # of n ranks, on one node or on several
    "naive": (naive_all_reduce, catalog.naive_plan),
    "tree": (tree_all_reduce, catalog.tree_plan),
    "halving_doubling": (
        halving_doubling_all_reduce,
        halving_doubling.halving_doubling_plan,
    ),
    "ring": (ring_all_reduce, catalog.ring_plan),
} | {
    variant: (
        partial(hierarchical_all_reduce, variant=variant),
        lambda n, plan=plan: plan(
            here().topology.nnodes, here().topology.nproc_per_node
        ),
    )
    for variant, plan in hierarchical.PLANS.items()
}


def in_pieces_of(nbytes: int):
    """On a rank: let messages travel in pieces of `nbytes` bytes, within the block."""
    return patch.object(runtime, "PIECE", nbytes)


def brought(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank brings: in every place something else, and from every rank."""
    return (torch.arange(numel) % 11 + 100**rank).to(dtype)


def wrong_sums(cases: list[tuple[int, torch.dtype]]) -> list[str]:
    """On every rank: all-reduce in small pieces, now and under way; return mistakes."""
    me, n = dist.get_rank(), dist.get_world_size()
    wrong = []
    for numel, dtype in cases:
        everyones = [brought(rank, numel, dtype) for rank in range(n)]
        total = torch.stack(everyones).sum(0, dtype=dtype)
        for name, (all_reduce, _) in PLANS.items():
            results = f"{name}: {numel} {dtype}"
            tensors = [everyones[me].clone() for _ in range(4)]
            with in_pieces_of(SMALL):
                all_reduce(tensors[0])
                works = [all_reduce(t, ReduceOp.SUM, None, True) for t in tensors[1:3]]
                all_reduce(tensors[3], ReduceOp.MAX)
                for work in works:
                    work.wait()
            if not all(torch.equal(t, total) for t in tensors[:3]):
                wrong.append(results)
            if not torch.equal(tensors[3], everyones[-1]):
                wrong.append(f"{results}, largest")
            if dtype.is_floating_point:
                mean = everyones[me].clone()
                with in_pieces_of(SMALL):
                    all_reduce(mean, ReduceOp.AVG)
                wrong += [] if torch.equal(mean, total / n) else [f"{results}, mean"]
    return wrong


def bits_that_differ() -> list[str]:
    """On every rank: where the runtime that GPUs use gives other bits."""

    def carry_out(self, plan, buffer, op=None):
        runtime.step_by_step(plan, buffer, self.endpoint, op or self.op)

    torch.manual_seed(dist.get_rank())
    wrong = []
    for name, (all_reduce, _) in PLANS.items():
        a = torch.randn(100_003)
        b = a.clone()
        with in_pieces_of(30_000):
            all_reduce(a, ReduceOp.AVG)
        with patch.object(
            Collective, "carry_out", carry_out
        ):  # in batches, as NCCL wants them
            all_reduce(b, ReduceOp.AVG)
        if not torch.equal(a.view(torch.int32), b.view(torch.int32)):
            wrong.append(name)
    return wrong


FLOAT64, INT64, INT32 = torch.float64, torch.int64, torch.int32
CASES = [  # every length, and every type: pieces have 125 numbers, or 250
    *((numel, FLOAT64) for numel in (1, 124, 125, 126, 1009, 3001)),
    *((numel, INT64) for numel in (5, 125, 1009)),
    *((numel, INT32) for numel in (249, 250, 251, 1009)),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("nnodes", "nproc"), [(1, 3), (2, 2)])
def test_all_reduces_in_pieces_give_the_exact_sums_and_the_bits_of_steps(nnodes, nproc):
    shape = {"nnodes": nnodes, "nproc_per_node": nproc, "output": "none"}
    shape["timeout"] = 840
    wrong = spawn(lambda: wrong_sums(CASES) + bits_that_differ(), **shape)
    assert wrong == [[]] * (nnodes * nproc)


def messages(numel: int) -> dict[str, int]:
    """On a rank: how many messages each algorithm sent."""
    results = {}
    for name, (all_reduce, _) in PLANS.items():
        with ByteMeter() as meter:
            all_reduce(torch.ones(numel))
        results[name] = meter.total_messages
    return results


def cut_and_whole() -> tuple[dict[str, int], ...]:
    """On a rank: messages in pieces, messages, and transfers, by algorithm."""
    with in_pieces_of(SMALL):
        cut = messages(3001)
    me, n = dist.get_rank(), dist.get_world_size()
    transfers = {name: len(plan(n).sent_by(me)) for name, (_, plan) in PLANS.items()}
    return cut, messages(3001), transfers


def test_messages_are_really_cut():
    for cut, whole, transfers in spawn(cut_and_whole, nnodes=2, nproc_per_node=2):
        assert whole == transfers
        for name, number in transfers.items():
            assert cut[name] >= 3 * number > 0  # of 750 numbers or more


# ---- planted: pieces that do not wait ----------------------------------------------


def first_piece_only(todo: RankPieces) -> dict[tuple[int, int], int]:
    """Return for each transfer what its first piece waits for."""
    first = {}
    for send in todo.sends:
        first.setdefault((send.peer, send.step), send.after)
    return first


MISTAKES = (  # how many receives a send waits for
    lambda send, todo: 0,  # all is sent at once, whatever is to be added before
    lambda send, todo: max(0, send.after - 1),  # not for the last piece
    lambda send, todo: first_piece_only(todo)[send.peer, send.step],
)


def planted() -> list[set[str]]:
    """On every rank: the algorithms that go wrong with each mistake."""
    seen, right = [], runtime.pieces_of
    for after in MISTAKES:

        def wrong(*args, after=after) -> RankPieces:
            todo = right(*args)
            sends = (replace(send, after=after(send, todo)) for send in todo.sends)
            return replace(todo, sends=tuple(sends))

        with patch.object(runtime, "pieces_of", wrong):
            seen.append(
                {
                    result.split(":")[0]
                    for result in wrong_sums([(3001, FLOAT64), (3001, INT32)])
                }
            )
    return seen


def test_planted_pieces_that_do_not_wait_are_seen(three_ranks):
    for seen in zip(*three_ranks["planted"], strict=True):
        assert {"tree", "ring", "sharded"} <= set().union(*seen)


# ---- all ranks cut alike ----------------------------------------------------------


def long_integers() -> list[bool]:
    """On every rank: chunks of more than one piece, of a type that is not float32."""
    me, n = dist.get_rank(), dist.get_world_size()
    numel = PIECE // 4 + 1  # of 8 bytes: more than two pieces
    sent = torch.stack([torch.full((numel,), 10 * me + j) for j in range(n)])
    rows, got = list(sent), list(torch.empty_like(sent))
    ours.all_to_all_single(arrived := torch.empty_like(sent), sent)
    right = [all((t == 10 * i + me).all() for i, t in enumerate(arrived))]
    ours.scatter(got[0], rows if me == n - 1 else None, n - 1)
    right.append(bool((got[0] == 10 * (n - 1) + me).all()))
    ours.gather(rows[0], got if me == 1 else None, 1)
    return [*right, me != 1 or all((t == 10 * i).all() for i, t in enumerate(got))]


def test_all_ranks_cut_the_same_pieces(three_ranks):
    assert three_ranks["long_integers"] == [[True] * 3] * 3


three_ranks = launched(3, planted, long_integers)
