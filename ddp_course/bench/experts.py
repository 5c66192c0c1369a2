"""Dispatch and combine of experts, compared with bare all-to-alls of the same bytes.

Each of four ranks has tokens whose choices are equal, random, or half on one rank's
experts. `dispatch` sorts the rows, exchanges counts, sends the rows, sorts the rows
that arrive, sends them back, and sums them by weight; the bare all-to-alls send as many
rows to each rank and back, from tensors that exist already. Experts compute nothing.
Only forward is timed. Chapter 17.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from ddp_course.bench import steps
from ddp_course.bench.turns import Pair, Row, Timings, rows_of
from ddp_course.experts.balance import loads
from ddp_course.experts.dispatch import TokenDispatcher, all_to_all_rows
from ddp_course.experts.gathered import gather_rows, sum_for_owners

ABOUT = "Dispatch and combine of experts, beside two bare all-to-alls."
OURS, BARE, NAIVE = "dispatch", "all-to-alls", "gathered"
PAIRS = (
    Pair(OURS, BARE, {16: 1.25, 64: 1.25}, "dispatch and combine", "two all-to-alls"),
    Pair(NAIVE, BARE, None, "all tokens on all ranks", "two all-to-alls"),
)
RANKS, EXPERTS, CHOICES, CHANNELS = 4, 16, 2, 1024


def bench(quick: bool) -> Iterator[Row]:
    """Yield rows for each size, in MiB that a rank sends, and each kind of loads."""
    for mib in (16,) if quick else (1, 16, 64):
        for kind in ("equal",) if quick else ("equal", "random", "half on one rank"):
            turns = 5 if quick else 9
            timings = steps.on_ranks(RANKS, timed, mib, kind, turns)
            yield from rows_of(
                f"{mib} MiB, {kind} loads", PAIRS, timings, tokens=mib, ranks=RANKS
            )


def chosen_experts(tokens: int, kind: str, seed: int) -> torch.Tensor:
    """Return the experts of each token, (N, k), for a load of this `kind`."""
    random = torch.Generator().manual_seed(seed)
    if kind == "equal":
        return (torch.arange(tokens * CHOICES) % EXPERTS).view(tokens, CHOICES)
    chosen = torch.rand(tokens, EXPERTS, generator=random).topk(CHOICES).indices
    if kind == "half on one rank":
        chosen[: tokens // 2] %= EXPERTS // RANKS
    return chosen


def timed(mib: int, kind: str, turns: int) -> Timings:
    """Return the seconds of each exchange, by turn; all ranks call it."""
    n, rank = dist.get_world_size(), dist.get_rank()
    tokens = mib * 2**20 // (4 * CHANNELS * CHOICES)
    chosen = chosen_experts(tokens, kind, rank)
    x, weights = torch.randn(tokens, CHANNELS), torch.rand(tokens, CHOICES)
    to_each = loads(chosen, EXPERTS).view(n, -1).sum(1)
    from_each = all_to_all_rows(to_each, [1] * n, [1] * n)
    sent, received = to_each.tolist(), from_each.tolist()
    out, back = torch.randn(sum(sent), CHANNELS), torch.randn(sum(received), CHANNELS)

    def dispatch() -> None:
        dispatcher = TokenDispatcher(chosen, EXPERTS)
        dispatcher.combine(dispatcher.dispatch(x), weights)

    def bare() -> None:
        all_to_all_rows(out, sent, received)
        all_to_all_rows(back, received, sent)

    def gathered() -> None:
        sum_for_owners(gather_rows(x))

    with torch.no_grad():
        ways = {OURS: dispatch, BARE: bare, NAIVE: gathered}
        return steps.together(ways, turns, 120.0, 1, warm=1)
