"""The exercises of chapter 02."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch02_collectives import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import (
    Answer,
    code,
    on_ranks,
    one_line,
)
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.messages import call_late, copied, only_messages
from ddp_course.measure import SystemBytes


def _expect_tensor(where: str, rank: int, got: Any, wanted: Tensor, why: str) -> None:
    """Expect a tensor of this shape with these numbers."""
    shown = code(one_line(got.tolist() if isinstance(got, Tensor) else got))
    expect(
        isinstance(got, Tensor),
        f"{where} rank {rank} has {shown}; expected a tensor: {why}.",
    )
    expect(
        got.shape == wanted.shape,
        f"{where} rank {rank} has a tensor of shape {tuple(got.shape)}; expected "
        f"{tuple(wanted.shape)}: {why}.",
    )
    expect(
        torch.equal(got, wanted),
        f"{where} rank {rank} has {shown}; expected {code(one_line(wanted.tolist()))}: "
        f"{why}.",
    )


def _numbers(rank: int) -> Tensor:
    """Return six numbers that tell whose they are."""
    return torch.arange(6).view(2, 3) + 10 * rank


# ---- swap --------------------------------------------------------------------------

PEERS = ([1, 0], [2, 3, 0, 1], [3, 2, 1, 0], [1, 0, 3, 2])


@exercise("swap", solution=solutions.swap)
def check_swap(answer: Answer) -> str:
    """`swap(tensor, peer)`: the peer's tensor, while the peer gets this rank's."""
    hint = (
        "Of two peers exactly one must send first, whichever ranks they are: which of "
        "the two it is, both must know without a message."
    )
    for peers in PEERS:
        pairs = " and ".join(f"{r} <-> {p}" for r, p in enumerate(peers) if r < p)
        where = f"With the pairs {pairs},"
        real = on_ranks(_swap, answer, peers, world_size=len(peers), hint=hint)
        for rank, (told, peer) in enumerate(zip(real, peers, strict=True)):
            only_messages(where, told)
            why = f"what rank {peer} gave"
            _expect_tensor(where, rank, told["got"], _numbers(peer), why)
            expect(
                told["untouched"],
                f"{where} the tensor that rank {rank} gave was changed; receive into a "
                "tensor of your own.",
            )
            expect(
                told["sent"] == [(peer, 6)],
                f"{where} rank {rank} sent messages of "
                f"{[numel for _, numel in told['sent']]} numbers; one of 6 is enough.",
            )
    return "on 2 and 4 real ranks, for all pairs that there are, nobody waits for ever"


def _swap(function: Callable, peers: Sequence[int]) -> dict[str, Any]:
    rank = dist.get_rank()
    return call_late(function, _numbers(rank), peers[rank])


# ---- my_all_gather -----------------------------------------------------------------


@exercise("my_all_gather", solution=solutions.my_all_gather)
def check_my_all_gather(answer: Answer) -> str:
    """`my_all_gather(tensor)`: the tensors of all ranks, as a list in rank order."""
    hint = "Start what you send (`isend`) before you wait for what you receive."
    for n in (2, 3, 4, 5, 1):
        where = f"With {n} ranks,"
        real = on_ranks(_gather, answer, world_size=n, hint=hint)
        for rank, told in enumerate(real):
            only_messages(where, told)
            _judge_list(where, rank, n, told["got"])
            expect(
                told["untouched"],
                f"{where} the tensor that rank {rank} gave was changed.",
            )
        for rank, told in enumerate(real):
            sent = sum(numel for _, numel in told["sent"])
            expect(
                sent <= 6 * (n - 1),
                f"{where} rank {rank} sent {sent} numbers; with tensors of 6 numbers, "
                f"{6 * (n - 1)} are enough for every rank. Does one rank do the work "
                "of all, or does something travel twice?",
            )
    return (
        "1 to 5 ranks that come one after the other have everyone's tensors in order, "
        "and nobody sent more than N - 1 tensors"
    )


def _gather(function: Callable) -> dict[str, Any]:
    return call_late(function, _numbers(dist.get_rank()))


def _judge_list(where: str, rank: int, n: int, got: Any) -> None:
    expect(
        isinstance(got, list) and len(got) == n,
        f"{where} rank {rank} returned {code(one_line(got))}; expected a list of {n} "
        "tensors.",
    )
    for other, tensor in enumerate(got):
        why = f"entry {other} of the list is what rank {other} gave"
        _expect_tensor(f"{where} in entry {other},", rank, tensor, _numbers(other), why)


# ---- my_broadcast ------------------------------------------------------------------


@exercise("my_broadcast", solution=solutions.my_broadcast)
def check_my_broadcast(answer: Answer) -> str:
    """`my_broadcast(tensor)`: rank 0's numbers in everybody's tensor, along a tree."""
    hint = "Who has the numbers already, and whom does each of them serve next?"
    for n in (2, 3, 4, 5, 8, 1):
        where = f"With {n} ranks,"
        real = on_ranks(_spread, answer, world_size=n, hint=hint)
        for rank, told in enumerate(real):
            only_messages(where, told)
            why = "rank 0's numbers, in the tensor that was given"
            _expect_tensor(where, rank, told["given"], _numbers(0), why)
        _judge_tree(where, n, real, hint)
    return (
        "1 to 8 ranks have rank 0's numbers; each received them once, and after "
        "ceil(log2 N) steps all was done"
    )


def _spread(function: Callable) -> dict[str, Any]:
    rank = dist.get_rank()
    return call_late(function, _numbers(0) if rank == 0 else torch.full((2, 3), -1))


def _judge_tree(where: str, n: int, real: list[dict[str, Any]], hint: str) -> None:
    """Count messages and steps; in a step a rank sends one message at most."""
    sent = [dst for told in real for dst, _ in told["sent"]]
    for rank in range(n):
        times = sent.count(rank)
        expect(
            times == (rank != 0),
            f"{where} {times} messages went to rank {rank}; expected "
            f"{int(rank != 0)}, with the whole tensor.",
        )
    arrived, ranks = {0: 0}, [0]
    for rank in ranks:  # grows meanwhile
        for k, (dst, _) in enumerate(real[rank]["sent"], start=1):
            arrived[dst] = arrived[rank] + k
            ranks.append(dst)
    steps, least = max(arrived.values(), default=0), (n - 1).bit_length()
    slowest = max(arrived, key=lambda rank: arrived[rank])
    expect(
        steps <= least,
        f"{where} rank {slowest} gets its message in step {steps}, if in each step "
        f"every rank sends one message at most; {least} steps are enough. {hint}",
    )


# ---- my_transpose ------------------------------------------------------------------

BLOCK = 60  # rows of each rank


@exercise("my_transpose", solution=solutions.my_transpose)
def check_my_transpose(answer: Answer) -> str:
    """`my_transpose(rows)`: this rank's rows of the transposed matrix."""
    hint = "Which block of your rows does rank j need, and how must it be turned?"
    for n in (2, 3, 4, 1):
        where = f"With {n} ranks and a matrix of {BLOCK * n} x {BLOCK * n},"
        real = on_ranks(_transpose, answer, world_size=n, hint=hint)
        matrix = _matrix(n)
        for rank, told in enumerate(real):
            _judge_rows(where, rank, told, matrix, hint)
        wanted = (n - 1) * BLOCK * BLOCK * matrix.element_size()
        for rank, told in enumerate(real):
            written = told["written"]
            if written is None:
                continue
            more = written - wanted
            expect(
                -0.02 * wanted <= more <= 0.02 * wanted + 4000 * n,
                f"{where} rank {rank} sent {written:,} bytes by the operating system's "
                f"count; each other rank needs one block of {BLOCK} x {BLOCK} from it, "
                f"{wanted:,} bytes in all.",
            )
    return (
        "on 1 to 4 real ranks every row is right, and each rank sent every other rank "
        "one block, by the operating system's count"
    )


def _matrix(n: int) -> Tensor:
    return torch.arange((BLOCK * n) ** 2).view(BLOCK * n, BLOCK * n)


def _transpose(function: Callable) -> dict[str, Any]:
    rank, n = dist.get_rank(), dist.get_world_size()
    rows = _matrix(n)[BLOCK * rank : BLOCK * (rank + 1)].clone()
    before = rows.clone()
    barrier()
    written = None
    try:
        with SystemBytes() as system:
            got = function(rows)
        written = system.written
    except RuntimeError as error:
        if "SystemBytes" not in str(error):
            raise
        got = function(rows)  # a system that does not count
    return {
        "got": copied(got),
        "written": written,
        "untouched": torch.equal(rows, before),
    }


def _judge_rows(
    where: str, rank: int, told: dict[str, Any], matrix: Tensor, hint: str
) -> None:
    got, wanted = told["got"], matrix.T[BLOCK * rank : BLOCK * (rank + 1)]
    expect(
        isinstance(got, Tensor) and got.shape == wanted.shape,
        f"{where} rank {rank} returned "
        f"{code(one_line(getattr(got, 'shape', got)))}; expected a tensor of shape "
        f"{tuple(wanted.shape)}.",
    )
    wrong = (got != wanted).nonzero()
    i, j = wrong[0].tolist() if len(wrong) else (0, 0)
    expect(
        not len(wrong),
        f"{where} {len(wrong)} of rank {rank}'s numbers are not right: in its row {i}, "
        f"place {j}, is {got[i, j]}, expected {wanted[i, j]}. {hint}",
    )
    expect(told["untouched"], f"{where} the rows that rank {rank} gave were changed.")
