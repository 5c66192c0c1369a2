"""Which rank has which positions of a sequence, and how much work that is.

In causal attention position i looks at positions 0 to i. So a rank's work, the number
of pairs (query, key) that it computes, depends on where its queries are:

    16 positions, 4 ranks     rank 0        rank 1        rank 2        rank 3
    contiguous                0  1  2  3    4  5  6  7    8  9 10 11    12 13 14 15
      pairs                   10            26            42            58
    zigzag                    0  1 14 15    2  3 12 13    4  5 10 11    6  7  8  9
      pairs                   34            34            34            34
    striped                   0  4  8 12    1  5  9 13    2  6 10 14    3  7 11 15
      pairs                   28            32            36            40

All ranks wait for the slowest. Zigzag: Llama 3 report, section 3.3.2 (Dubey et al.
2024); striped: Brandon et al. 2023, arXiv:2311.09431.
"""

from collections.abc import Sequence

ASSIGNMENTS = ("contiguous", "zigzag", "striped")
Positions = tuple[range, ...]  # one rank's positions, as ranges that do not overlap


def assign(length: int, num_ranks: int, assignment: str = "zigzag") -> list[Positions]:
    """Return each rank's positions of a sequence of `length`; pure.

    All ranks have the same number of positions. Zigzag cuts the sequence into twice as
    many chunks as ranks; each rank has one from the front and one from the back. Raises
    ValueError for a length that cannot be divided like this; pad it to `padded_length`.
    """
    n = num_ranks
    if padded_length(length, n, assignment) != length:
        unit = n * (2 if assignment == "zigzag" else 1)
        raise ValueError(
            f"length is {length}; {assignment} over {n} ranks needs a multiple of "
            f"{unit}: pad the sequence"
        )
    if assignment == "striped":
        return [(range(r, length, n),) for r in range(n)]
    if assignment == "contiguous":
        c = length // n
        return [(range(r * c, (r + 1) * c),) for r in range(n)]
    c = length // (2 * n)
    chunks = [range(k * c, (k + 1) * c) for k in range(2 * n)]
    return [(chunks[r], chunks[2 * n - 1 - r]) for r in range(n)]


def padded_length(length: int, num_ranks: int, assignment: str) -> int:
    """Return the smallest length, `length` or more, that can be divided; pure.

    Causal attention never looks at padding after the last position.
    """
    if assignment not in ASSIGNMENTS:
        known = ", ".join(ASSIGNMENTS)
        raise ValueError(f"assignment is {assignment!r}; it can be {known}")
    if min(length, num_ranks) < 1:
        both = f"length is {length} and num_ranks {num_ranks}"
        raise ValueError(f"{both}; both must be 1 or more")
    unit = num_ranks * (2 if assignment == "zigzag" else 1)
    return -(-length // unit) * unit


def pairs(queries: Sequence[int], keys: Sequence[int]) -> int:
    """Return how many pairs (query, key) of these positions are visible; pure.

    `queries` and `keys` are ascending. A query sees the keys at its own position and
    before.
    """
    count, visible = 0, 0
    for query in queries:
        while visible < len(keys) and keys[visible] <= query:
            visible += 1
        count += visible
    return count


def work(assigned: Sequence[Positions]) -> list[int]:
    """Return how many pairs each rank computes over the whole sequence; pure."""
    keys = sorted(p for ranges in assigned for some in ranges for p in some)
    return [sum(pairs(queries, keys) for queries in ranges) for ranges in assigned]
