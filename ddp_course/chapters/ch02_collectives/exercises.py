"""The exercises of chapter 02."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch02_collectives import solutions
from ddp_course.collectives import barrier
from ddp_course.lab.answers import Answer
from ddp_course.lab.exercises import (
    equal,
    exercise,
    expect,
    judge_ranks,
    shown,
    written_by,
)
from ddp_course.lab.hard import hard_tensors, unchanged
from ddp_course.lab.messages import MESSAGES, WAITED, call_late, copied


def _tensors(rank: int, n: int) -> Iterator[Tensor]:
    """Yield six numbers that tell whose they are, and then hard ones.

    Messages carry contiguous tensors, and gloo no empty one from any rank.
    """
    yield torch.arange(6).view(2, 3) + 10 * rank
    hard = hard_tensors(rank, n, but=["strided", "empty"])
    yield from (tensor for _, tensor in hard)


# ---- swap --------------------------------------------------------------------------

PEERS = ([1, 0], [2, 3, 0, 1], [3, 2, 1, 0], [1, 0, 3, 2])
SWAP = {
    **MESSAGES,
    **WAITED,
    "right": "has {shown}; expected {wanted}: what rank {peer} gave.",
    "untouched": "changed the tensor that it was given; receive into a tensor of your "
    "own.",
    "once": "sent messages of {lengths} numbers; one of {numel} is enough.",
}


@exercise("swap", solution=solutions.swap)
def check_swap(answer: Answer) -> str:
    """`swap(tensor, peer)`: the peer's tensor, while the peer gets this rank's.

    If both send first, both may wait for ever. By what can two ranks tell, without a
    message, which of them is to begin?

    Compare the two ranks: the lower one sends and then receives, the other receives and
    then sends. Receive into an empty tensor like the given one.
    """
    hint = (
        "Of two peers exactly one must send first, whichever ranks they are: which of "
        "the two it is, both must know without a message."
    )
    for peers in PEERS:
        judge_ranks(SWAP, _swap, answer, peers, worlds=[len(peers)], hint=hint)
    return "on 2 and 4 real ranks, for all pairs that there are, nobody waits for ever"


def _swap(function: Callable, peers: Sequence[int]) -> Iterator[dict[str, Any]]:
    rank, n = dist.get_rank(), dist.get_world_size()
    peer = peers[rank]
    pairs = " and ".join(f"{r} <-> {p}" for r, p in enumerate(peers) if r < p)
    for mine, wanted in zip(_tensors(rank, n), _tensors(peer, n), strict=True):
        told = call_late(function, mine, peer)
        told |= {"right": equal(told["got"], wanted), "shown": shown(told["got"])}
        told |= {"wanted": shown(wanted), "peer": peer, "numel": mine.numel()}
        told["lengths"] = [numel for _, numel in told["sent"]]
        told["case"] = f"in the pairs {pairs}"
        told["once"] = told["sent"] == [(peer, mine.numel())]
        yield told


# ---- my_broadcast ------------------------------------------------------------------

SPREAD = {
    **MESSAGES,
    **WAITED,
    "right": "has {shown}; expected {wanted}: rank 0's numbers, in the tensor that was "
    "given.",
}


@exercise("my_broadcast", solution=solutions.my_broadcast)
def check_my_broadcast(answer: Answer) -> str:
    """`my_broadcast(tensor)`: rank 0's numbers in everybody's tensor, along a tree.

    After a step two ranks have the numbers, after two steps four. Whom must the root
    serve first, so that this one can serve most of the others?

    A distance goes from the largest power of two below N down to 1, halved in every
    step. In a step, multiples of twice the distance have the numbers: they send them
    that far, if there is such a rank, and it receives.
    """
    hint = "Who has the numbers already, and whom does each of them serve next?"
    for n in (2, 3, 4, 5, 8, 1):
        real = judge_ranks(SPREAD, _spread, answer, worlds=[n], hint=hint)
        for case in zip(*real, strict=True):
            _judge_tree(f"With {n} ranks,", n, case, hint)
    return (
        "1 to 8 ranks have rank 0's numbers; each received them once, and after "
        "ceil(log2 N) steps all was done"
    )


def _spread(function: Callable) -> Iterator[dict[str, Any]]:
    rank, n = dist.get_rank(), dist.get_world_size()
    for wanted in _tensors(0, n):
        given = wanted.clone() if rank == 0 else torch.full_like(wanted, -1)
        told = call_late(function, given)
        told |= {"right": equal(told["given"], wanted), "shown": shown(told["given"])}
        yield told | {"wanted": shown(wanted)}


def _judge_tree(where: str, n: int, real: Sequence[dict[str, Any]], hint: str) -> None:
    """Count messages and steps; in a step a rank sends one message at most."""
    sent = [dst for told in real for dst, _ in told["sent"]]
    for rank in range(n):
        times, once = sent.count(rank), int(rank != 0)
        says = f"{times} messages went to rank {rank}; expected {once}, with the whole"
        expect(times == once, f"{where} {says} tensor.")
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

TRANSPOSE = {
    "fits": "returned {got}; expected a tensor of shape {shape}, of {dtype}.",
    "right": "has numbers that are not right: in its row {i}, place {j}, is {one}, "
    "expected {wanted}. {hint}",
    "kept": "changed the rows that it was given.",
    "least": "sent {written} bytes by the operating system's count; each other rank "
    "needs one block of {block} x {block} from it, {needed} bytes in all.",
}
MATRICES = {  # rows of each rank, and their type: the first is large enough to weigh
    "rows of 60": (60, torch.int64),
    "a row of float64": (1, torch.float64),
    "rows of bfloat16": (3, torch.bfloat16),
    "a matrix without rows": (0, torch.float32),
}


@exercise("my_transpose", solution=solutions.my_transpose)
def check_my_transpose(answer: Answer) -> str:
    """`my_transpose(rows)`: this rank's rows of the transposed matrix.

    Cut your rows into a block for each rank. Which collective sends something else to
    every rank, and how must a block be turned?

    Transpose your rows, cut the result into N blocks of rows, make them contiguous, and
    exchange them all to all. Put what arrives side by side, by rank.
    """
    hint = "Which block of your rows does rank j need, and how must it be turned?"
    judge_ranks(TRANSPOSE, _transposes, answer, worlds=(2, 3, 4, 1), hint=hint)
    return (
        "on 1 to 4 real ranks every row is right, and each rank sent every other rank "
        "one block, by the operating system's count"
    )


def _transposes(function: Callable) -> Iterator[dict[str, Any]]:
    rank, n = dist.get_rank(), dist.get_world_size()
    for case, (block, dtype) in MATRICES.items():
        mine = slice(block * rank, block * (rank + 1))
        numbers = torch.arange((block * n) ** 2).double() * 1.25 + 2**-40
        matrix = numbers.to(dtype).view(block * n, block * n)
        rows, wanted = matrix[mine].clone(), matrix.T[mine]
        barrier()
        with unchanged(rows) as told:
            got, written = written_by(function, rows)
        needed = (n - 1) * block * block * matrix.element_size()
        least = written is None or written <= 1.02 * needed + 4000 * n
        told["least"] = least and (written is None or written >= 0.98 * needed)
        told |= {"case": case, "got": shown(copied(got)), "block": block}
        told |= {"written": f"{written or 0:,}", "needed": f"{needed:,}"}
        told |= {"shape": tuple(wanted.shape), "dtype": str(dtype)[6:], "right": True}
        told["fits"] = isinstance(got, Tensor) and got.shape == wanted.shape
        told["fits"] = told["fits"] and got.dtype == dtype
        if told["fits"] and (wrong := (got != wanted).nonzero().tolist()):
            i, j = wrong[0]
            told |= {"right": False, "i": i, "j": j}
            told |= {"one": got[i, j].item(), "wanted": wanted[i, j].item()}
        yield told
