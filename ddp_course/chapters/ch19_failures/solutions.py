"""Solutions of the exercises of chapter 19."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

# ---- my_interval ---------------------------------------------------------------------


def my_interval(save: float, restart: float, one: float, gpus: int) -> float:
    """Return Daly's interval; a restart costs the same at any interval."""
    mean = one / gpus
    ratio = save / (2 * mean)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return math.sqrt(2 * save * mean) * series - save


# ---- my_rows -------------------------------------------------------------------------


# ---- my_suspect ----------------------------------------------------------------------


def my_suspect(
    digests: Sequence[Sequence[int]],
) -> tuple[list[int] | None, int | None]:
    """Find the first comparison without agreement, and its ranks without a majority."""
    for k, row in enumerate(digests):
        [(common, votes)] = Counter(row).most_common(1)
        if votes == len(row):
            continue
        if 2 * votes <= len(row):
            return None, k
        return [rank for rank, own in enumerate(row) if own != common], k
    return [], None


# ---- my_diagnosis --------------------------------------------------------------------
