"""The rows of a bench as a table: a line for each case, a column for each comparison.

First what is compared with what; last what was asked for, and whether it held.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddp_course.bench.turns import LOUD, Pair

WIDTH = 100
UNITS = {"seconds": ("ms", 1e3), "bytes": ("MB", 1e-6), "bytes/s": ("GB/s", 1e-9)}
Rows = Sequence[Mapping[str, Any]]
Found = dict[str, Mapping[str, Any]]  # case -> its row


def lines(about: str, pairs: Iterable[Pair], rows: Rows) -> list[str]:
    """Return what is printed of a bench, at most `WIDTH` characters a line."""
    text = textwrap.wrap(
        f"{about} Numbers are ratios: below 1, the variant in the column's head takes "
        "less than what it is laid over. The narrow column is that of the latter.",
        WIDTH,
    )
    panels = grouped(pairs, rows)
    for over, columns in panels.items():
        text += ["", f"over {over}", *_grid(columns)]
    held = [line for columns in panels.values() for line in _held(columns)]
    if held:
        text += ["", "Asked for, and held?", *held]
    loud = max((row.get("others", 0.0) for row in rows), default=0.0)
    if loud > LOUD:
        text += textwrap.wrap(
            f"Other programs took up to {loud:.0%} of the machine meanwhile: such times"
            " say little. Measure again when it is quiet.",
            WIDTH,
        )
    return text


def grouped(
    pairs: Iterable[Pair], rows: Rows
) -> dict[str, list[tuple[Pair, Found]]]:
    """Return what is laid over -> the pairs that are, and their rows by case."""
    panels: dict[str, list[tuple[Pair, Found]]] = {}
    for pair in pairs:
        found = {
            case_of(row): row
            for row in rows
            if (variant_of(row), row.get("beside", "")) == (pair.variant, pair.beside)
        }
        if found:
            panels.setdefault(pair.over or pair.beside, []).append((pair, found))
    return panels


def variant_of(row: Mapping[str, Any]) -> str:
    """Return whose time it is that a row divides."""
    return row.get("variant", row.get("algorithm", ""))


def case_of(row: Mapping[str, Any]) -> str:
    """Return which case a row is of: what its rows have in common."""
    if "variant" in row:
        return row["case"].rpartition(", ")[0]
    return row["case"].removesuffix(f", {variant_of(row)}")


def ratio_of(row: Mapping[str, Any]) -> float:
    """Return the ratio that counts: of times the one within turns, if there is one."""
    return row.get("paired", row["ratio"])


def title_of(pair: Pair) -> str:
    """Return the head of a column: the variant, without what both are called."""
    own, other = pair.variant.split(), pair.beside.split()
    shared = own[:-1] == other[:-1] or own[: len(other)] == other
    return pair.title or (" ".join(own[-1:]) if shared else pair.variant)


def _grid(columns: list[tuple[Pair, Found]]) -> list[str]:
    """Return the lines of one table; below one another, if it would be too wide."""
    cases = list(dict.fromkeys(case for _, found in columns for case in found))
    left = [_column([], cases, str.ljust)]
    if len({pair.beside for pair, _ in columns}) == 1:
        (_, found), *_ = columns
        unit, scale = UNITS.get(found[cases[0]]["metric"], ("", 1.0))
        theirs = [f"{scale * found[case]['theirs']:.3g}" for case in cases]
        left.append(_column([unit], theirs))
    right = [
        _column(
            title_of(pair).split(),
            [f"{ratio_of(found[c]):.2f}" if c in found else "" for c in cases],
        )
        for pair, found in columns
    ]
    parts = [left]
    for column in right:
        if sum(len(each[-1]) + 2 for each in (*parts[-1], column)) > WIDTH:
            parts.append(left[:1])
        parts[-1] = [*parts[-1], column]
    return [line for part in parts for line in _beside(part)]


def _column(
    head: list[str], cells: list[str], align: Callable[..., str] = str.rjust
) -> list[str]:
    width = max(map(len, (*head, *cells)))
    return [align(cell, width) for cell in (*head, *cells)]


def _beside(columns: list[list[str]]) -> list[str]:
    """Return the lines of columns of which some have longer heads: all end below."""
    most = max(map(len, columns))
    full = [[" " * len(c[-1])] * (most - len(c)) + c for c in columns]
    return ["  ".join(cells).rstrip() for cells in zip(*full, strict=True)]


def _held(columns: list[tuple[Pair, Found]]) -> list[str]:
    """Return a line for each ratio that is asked for, and one for each control."""
    told = []
    for pair, found in columns:
        over = f"{pair.variant} over {pair.over or pair.beside}"
        if pair.control:
            ratios = [ratio_of(row) for row in found.values()]
            span = f"{min(ratios):.2f} to {max(ratios):.2f}"
            told.append(f"  noise  {over}: {span}, and is the same thing")
        bars = {case: pair.bar(row) for case, row in found.items()}
        for bar in dict.fromkeys(bar for bar in bars.values() if bar is not None):
            ratios = {c: ratio_of(found[c]) for c, asked in bars.items() if asked == bar}
            span = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}"
            missed = [case for case, ratio in ratios.items() if ratio > bar]
            answer = "no   " if missed else "yes  "
            where = f"; not in {'; '.join(missed)}" if missed else ""
            told += textwrap.wrap(
                f"  {answer}  {over} at most {bar:g}: {span} in {len(ratios)} "
                f"case{'s' * (len(ratios) > 1)}{where}",
                WIDTH,
                subsequent_indent=" " * 9,
            )
    return told
