"""More exercises of chapter 08: whose file holds what, and how many ranks it takes."""

from __future__ import annotations

import itertools
from typing import Any

from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.solutions import ch08 as solutions

# ---- who_reads_what ----------------------------------------------------------------


@exercise("who_reads_what", solution=solutions.who_reads_what)
def check_who_reads_what(answer: Answer) -> str:
    """`who_reads_what(numel, saved, rank, ranks)`: (file, first, last), in order."""
    cases = 0
    for numel, saved, ranks in itertools.product(
        (12, 10, 1, 5, 97), (4, 1, 3), (1, 2, 3, 4)
    ):
        length = -(-numel // saved)
        files = [
            list(range(numel))[k * length : (k + 1) * length] for k in range(saved)
        ]
        for rank in range(ranks):
            call = answer.call(numel, saved, rank, ranks)
            got = answer(numel, saved, rank, ranks)
            _judge_reads(call, got, files)
            mine = -(-numel // ranks)
            wanted = list(range(numel))[rank * mine : (rank + 1) * mine]
            read = [x for file, a, b in got for x in files[file][a:b]]
            _judge_elements(call, read, wanted)
            cases += 1
    return (
        f"{cases} ranks, from 1, 3 or 4 files: each reads the elements of its own "
        "shard, in order, and nothing else"
    )


def _judge_reads(call: str, got: Any, files: list[list[int]]) -> None:
    fine = isinstance(got, list) and all(
        isinstance(read, tuple) and len(read) == 3 and all(type(k) is int for k in read)
        for read in got
    )
    expect(
        fine,
        f"{call} returned {code(one_line(got))}; expected a list of (file, first, "
        "last).",
    )
    for read in got:
        file, first, last = read
        expect(
            0 <= file < len(files),
            f"{call} reads from file {file}, which is not there.",
        )
        held = len(files[file])
        expect(
            first < last,
            f"{call} has {code(repr(read))}, which reads nothing; leave it out.",
        )
        expect(
            first >= 0 and last <= held,
            f"{call} has {code(repr(read))}, but file {file} has the elements 0 to "
            f"{held - 1} of its own: count them from the file's beginning, and there "
            "is no padding in it.",
        )


def _judge_elements(call: str, read: list[int], wanted: list[int]) -> None:
    shown = f"{wanted[0]} to {wanted[-1]}" if wanted else "none at all"
    missing = sorted(set(wanted) - set(read))
    expect(
        not missing,
        f"{call} does not read element {missing[:1]}; this rank's shard has the "
        f"elements {shown} of the flat tensor.",
    )
    expect(
        len(read) <= len(wanted),
        f"{call} reads {len(read)} elements; this rank's shard has {len(wanted)} "
        f"({shown}). Whoever reads everything needs the memory for everything.",
    )
    expect(
        read == wanted,
        f"{call} reads the right elements in another order: {code(one_line(read))}; "
        "they must come as they lie in the shard.",
    )


# ---- ranks_needed ------------------------------------------------------------------

CASES = (
    # units, memory, activations
    ([100, 100, 100, 100], 4000, 500),
    ([100, 100, 100, 100], 1900, 500),
    ([100, 100, 100, 100], 1700, 500),
    ([100, 100, 100, 100], 1699, 500),
    ([50, 300, 20, 200, 10], 3000, 0),
    ([300, 20, 200], 4000, 0),
    ([7, 5, 3], 200, 3),
    ([1001], 9000, 0),
    ([1001], 8023, 0),
    ([10, 10], 120 + 16 * 2, 0),
    ([400, 100, 100, 400], 6000, 1000),
)


@exercise("ranks_needed", solution=solutions.ranks_needed)
def check_ranks_needed(answer: Answer) -> str:
    """`ranks_needed(units, memory, activations)`: the least number, or None."""
    for units, memory, activations in CASES:
        got = answer(list(units), memory, activations)
        wanted = solutions.ranks_needed(list(units), memory, activations)
        if got == wanted and type(got) is type(wanted):
            continue
        call = answer.call(units, memory, activations)
        expect(
            got is None or type(got) is int and 1 <= got <= 1024,
            f"{call} returned {code(one_line(got))}; expected a number of ranks, 1 to "
            "1024, or None.",
        )
        expect(
            got is None or wanted is not None,
            f"{call} returned {code(one_line(got))}, but no number of ranks is enough: "
            "what is whole, gradients and activations do not get less with more ranks.",
        )
        needs = _needs(units, activations, wanted if got is None else got)
        expect(
            got is not None,
            f"{call} returned `None`, but {wanted} ranks are enough: each needs "
            f"{needs} of {memory} bytes.",
        )
        expect(
            got > wanted,
            f"{call} returned {got}, but with {got} a rank needs {needs} bytes and has "
            f"{memory}.",
        )
        expect(
            False,
            f"{call} returned {got}, but {wanted} are enough: each needs "
            f"{_needs(units, activations, wanted)} of {memory} bytes.",
        )
    return (
        f"{len(CASES)} models, among them some that fit on no number of ranks: the "
        "least that is enough"
    )


def _needs(units: tuple[int, ...] | list[int], activations: int, ranks: int) -> str:
    """Write the bytes of a rank, part by part."""
    pairs = [units] if len(units) == 1 else list(zip(units, units[1:], strict=False))
    parts = {
        "shards": sum(16 * -(-unit // ranks) for unit in units),
        "two whole units": 4 * max(map(sum, pairs)),
        "gradients": 4 * max(units),
        "activations": activations,
    }
    told = " + ".join(f"{nbytes:,} ({name})" for name, nbytes in parts.items())
    return f"{sum(parts.values()):,} = {told}"
