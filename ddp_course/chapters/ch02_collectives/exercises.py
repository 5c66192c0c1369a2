"""The exercises of chapter 02: a swap, a broadcast along a tree, a transpose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.chapters.ch02_collectives import solutions
from ddp_course.lab.answers import Answer, on_ranks
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.judge import Draw, same_on_ranks
from ddp_course.lab.messages import watched

# ---- swap --------------------------------------------------------------------------

SWAP = {
    "right": "has {got}; expected {wanted}{place}: rank {peer}'s tensor.",
    "kept": "changed its argument; receive into a tensor of your own.",
}


DEVICE = (
    "In this last case PyTorch's default device is not that of `tensor`, as with GPUs. "
    "Receive into a tensor on `tensor.device`: `torch.empty_like` returns one."
)
SHAPES = {2: (), 4: (50, 41)}  # {case: shape}; other cases draw one
KINDS = {6: torch.bool, 7: torch.complex64}  # {case: type}; other cases draw one
ORDERS = {  # {ranks: orders of them}; the 0th and 1st are peers, the 2nd and 3rd, ...
    2: [[0, 1]],
    4: [[0, 2, 1, 3], [0, 1, 2, 3], [0, 3, 1, 2]],  # each pair that there is
    6: [[0, 4, 1, 2, 3, 5]],  # also both in the first half, both in the second
}


@exercise("swap", solution=solutions.swap)
def check_swap(answer: Answer) -> str:
    """`swap(tensor, peer)`: the peer's tensor, while the peer gets this rank's.

    If both send first, both may wait for ever. How can two ranks know, without a
    message, which of them begins?

    Compare the two ranks: the lower one sends and then receives, the other receives and
    then sends. Receive into an empty tensor like the argument.
    """
    hint = (
        "Of two peers exactly one must send first, whichever ranks they are: both must "
        "know without a message which of them it is."
    )
    for worlds, cases in (((2, 4), 8), ((6,), 1)):
        real = same_on_ranks(
            *(answer, solutions.swap, _pair),
            worlds=worlds,
            cases=cases,
            watch=["messages"],
            hints=SWAP,
            hint=hint,
        )
        for rank, facts in enumerate(real):
            expect(
                all(None not in one["received"] for one in facts),
                f"With {worlds[-1]} ranks, rank {rank} receives from any rank. If it "
                "swaps with one peer after another, the second may be faster than the "
                "first. Receive from `peer`.",
            )
    on_ranks(_with_another_default, answer, world_size=2, hint=DEVICE)
    return "on 2, 4 and 6 real ranks, in any pairs, no rank waits for ever"


def _with_another_default(swap: Callable) -> None:
    """Swap two tensors that are not on PyTorch's default device."""
    tensor = torch.ones(2)
    with torch.device("meta"), watched():
        swap(tensor, 1 - dist.get_rank())


def _pair(d: Draw) -> tuple[Tensor, int]:
    orders = ORDERS[d.n]
    order = orders[d.case % len(orders)]
    tensor = d.tensor(SHAPES.get(d.case), KINDS.get(d.case))
    tensor = tensor * (1 - 2j) if tensor.is_complex() else tensor
    return tensor, order[order.index(d.rank) ^ 1]


# ---- my_broadcast ------------------------------------------------------------------

SPREAD = {
    "in_place": "has {got_in_place}; expected {wanted_in_place}{place_in_place}: rank "
    "0's numbers, in the argument itself.",
    "kept": "changed its tensor{place_in_place}; all ranks must get its numbers.",
}


RARE = {5: torch.bool, 6: torch.complex64}  # {case: type}


@exercise("my_broadcast", solution=solutions.my_broadcast)
def check_my_broadcast(answer: Answer) -> str:
    """`my_broadcast(tensor)`: rank 0's numbers in every rank's tensor, along a tree.

    After a step two ranks have the numbers, after two steps four. To which rank must
    the root send first, so that this rank can send to most of the others?

    The distance is at first the largest power of two below N, and is halved in every
    step, down to 1. In a step, the ranks that are multiples of twice the distance have
    the numbers: each sends them to the rank one distance further, if it exists.
    """
    hint = "Which ranks have the numbers already, and to whom does each send next?"
    for n in (2, 3, 6, 9, 1):
        real = same_on_ranks(
            *(answer, solutions.my_broadcast, _tensor),
            worlds=[n],
            cases=7 if n == 3 else 1,
            watch=["sends", "storage"],
            hints=SPREAD,
            hint=hint,
        )
        for case in zip(*real, strict=True):
            _judge_tree(f"With {n} rank{'s' * (n > 1)},", n, case, hint)
    return (
        "1, 2, 3, 6 and 9 ranks have rank 0's numbers; each received them once, "
        "in ceil(log2 N) steps"
    )


def _tensor(d: Draw) -> tuple[Tensor]:
    tensor = d.tensor(SHAPES.get(d.case), RARE.get(d.case))
    tensor = tensor * (1 - 2j) if tensor.is_complex() else tensor
    if d.case == 3:  # memory that was never written may hold anything
        tensor.fill_(torch.nan if d.rank else -torch.inf)
    return (tensor,)


def _judge_tree(where: str, n: int, real: Sequence[dict[str, Any]], hint: str) -> None:
    """Raise a Hint if there are too many messages or steps.

    In each step a rank sends one message at most.
    """
    sent = [dst for facts in real for dst, _ in facts["sent"]]
    for rank in range(n):
        times, once = sent.count(rank), int(rank != 0)
        went = "1 message" if times == 1 else f"{times} messages"
        says = f"{went} went to rank {rank}; expected {once}, with the whole tensor."
        expect(times == once, f"{where} {says}")
    arrived, ranks = {0: 0}, [0]
    for rank in ranks:  # grows during the loop
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

# (rows of each rank, dtype); in large matrices one sees the bytes of a wider type
MATRICES = (
    *((60, torch.int64), (1, torch.float64), (129, torch.bfloat16), (0, torch.float32)),
    *((129, torch.bool), (40, torch.int64), (129, torch.complex64)),
    (129, torch.float32),
)


@exercise("my_transpose", solution=solutions.my_transpose)
def check_my_transpose(answer: Answer) -> str:
    """`my_transpose(rows)`: this rank's rows of the transposed matrix.

    Cut your rows into a block for each rank. Which collective sends a different block
    to every rank, and how must a block be turned?

    Transpose your rows, cut the result into N blocks of rows, make them contiguous, and
    exchange them by an all-to-all. Join the blocks that arrive side by side, by rank.
    """
    hint = "Which block of your rows does rank j need, and how must it be turned?"
    same_on_ranks(
        *(answer, solutions.my_transpose, _rows),
        worlds=(2, 5, 1),
        cases=len(MATRICES),
        watch=["bytes"],
        hint=hint,
    )
    return (
        "on 1, 2 and 5 real ranks every row is right, and each sent each other rank "
        "one block, by the operating system's count"
    )


def _rows(d: Draw) -> tuple[Tensor]:
    block, dtype = MATRICES[d.case]
    rows = d.tensor((block, block * d.n), dtype)
    return (rows + 1j * d.case if dtype.is_complex else rows,)
