"""Solutions of the exercises of chapter 19."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations_with_replacement

# ---- my_interval ---------------------------------------------------------------------


def my_interval(save: float, restart: float, one: float, gpus: int) -> float:
    """Return Daly's interval; a restart costs the same at any interval."""
    mean = one / gpus
    ratio = save / (2 * mean)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * save * mean) * series - save


# ---- my_rows -------------------------------------------------------------------------


def my_rows(
    order: list[int], seen: int, old_ranks: int, batch: int, rank: int, ranks: int
) -> list[list[int]]:
    """Cut the rows that are not used yet into batches; take this rank's parts."""
    rows = batch // ranks
    mine = []
    for start in range(seen * old_ranks, len(order) - batch + 1, batch):
        first = start + rank * rows
        mine.append(order[first : first + rows])
    return mine


# ---- my_suspect ----------------------------------------------------------------------


def my_suspect(
    digests: Sequence[Sequence[int]],
) -> tuple[list[int] | None, int | None]:
    """Return the ranks outside the majority in the first comparison that disagrees."""
    for k, row in enumerate(digests):
        [(common, votes)] = Counter(row).most_common(1)
        if votes == len(row):
            continue
        if 2 * votes <= len(row):
            return None, k
        return [rank for rank, own in enumerate(row) if own != common], k
    return [], None


# ---- my_diagnosis --------------------------------------------------------------------


def my_diagnosis(
    calls: Sequence[Sequence[tuple[str, tuple[int, ...]]]], where: Sequence[str]
) -> tuple[str, int]:
    """Find a rank that others wait for; if all wait, the one with a different call."""
    last = {r: calls[r][-1] for r in range(len(where)) if where[r] == "collective"}
    for rank, (_, group) in last.items():
        come = [[g for _, g in calls[peer]].count(group) for peer in group]
        for peer, number in zip(group, come, strict=True):
            if number < come[group.index(rank)]:
                if where[peer] == "code":
                    return "stuck", peer
                if where[peer] == "returned":
                    return "left", peer
    groups = {group for _, group in last.values()}
    for one, two in combinations_with_replacement(groups, 2):
        both = [r for r in last if r in one and r in two and last[r][1] in (one, two)]
        waits = [last[r] for r in both]
        for odd in both:
            if waits.count(last[odd]) == 1 < len(waits):
                here = {group for _, group in waits}
                return ("skipped" if len(here) == 1 else "order"), odd
    raise ValueError(f"no rank in {where} is the cause by its calls {calls}")
