"""The rows of a bench as a table: a line for each case, a column for each comparison.

Above the table stands what was compared; below it, the required ratios and whether they
were met.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ddp_course.bench.turns import LOUD, Pair

WIDTH = 100
UNITS = {"seconds": ("ms", 1e3), "bytes": ("MB", 1e-6), "bytes/s": ("GB/s", 1e-9)}
Rows = Sequence[Mapping[str, Any]]
Found = dict[str, Mapping[str, Any]]  # case -> its row


def lines(about: str, pairs: Iterable[Pair], rows: Rows) -> list[str]:
    """Return the lines to print for a bench, each of at most `WIDTH` characters."""
    text = textwrap.wrap(
        f"{about} In a table 'over X', a column with a unit holds X's own values. The "
        "other columns are ratios: what the column's variant takes, divided by what X "
        "takes, the median of several turns. 0.8 means: 20 % less than X.",
        WIDTH,
    )
    panels = grouped(pairs, rows)
    for over, columns in panels.items():
        text += ["", f"over {over}", *_grid(columns)]
    verdicts = [line for columns in panels.values() for line in _bars(columns)]
    if verdicts:
        text += ["", "Required, and met?", *verdicts]
    loud = max((row.get("others", 0.0) for row in rows), default=0.0)
    if loud > LOUD:
        text += textwrap.wrap(
            f"Meanwhile, other programs took up to {loud:.0%} of the machine: these "
            "times say little. Measure again when the machine is quiet.",
            WIDTH,
        )
    return text


def grouped(pairs: Iterable[Pair], rows: Rows) -> dict[str, list[tuple[Pair, Found]]]:
    """Return {title of a table: its pairs, each with its rows by case}."""
    panels: dict[str, list[tuple[Pair, Found]]] = {}
    for pair in pairs:
        both = pair.variant, pair.denominator
        found = {r["case"]: r for r in rows if (r["variant"], r["denominator"]) == both}
        if found:
            panels.setdefault(pair.over or pair.denominator, []).append((pair, found))
    return panels


def number(value: float) -> str:
    """Return a value to three digits, without an exponent: 9,010 or 0.0123."""
    if value == 0:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def ratio_of(row: Mapping[str, Any]) -> float:
    """Return the ratio of a row: the median within turns, if the row has it."""
    return row.get("paired", row["ratio"])


def title_of(pair: Pair) -> str:
    """Return a column's head: the variant, without the denominator's words."""
    own, other = pair.variant.split(), pair.denominator.split()
    shared = own[:-1] == other[:-1] or own[: len(other)] == other
    return pair.title or (own[-1] if shared else pair.variant).replace("_", " ")


def _grid(columns: list[tuple[Pair, Found]]) -> list[str]:
    """Return the lines of a table; a table that would be too wide is split."""
    cases = list(dict.fromkeys(case for _, found in columns for case in found))
    left = [column([], cases, str.ljust)]
    if len({pair.denominator for pair, _ in columns}) == 1:
        (_, found), *_ = columns
        unit, scale = UNITS.get(found[cases[0]]["metric"], ("", 1.0))
        theirs = [number(scale * found[case]["theirs"]) for case in cases]
        left.append(column([unit], theirs))
    right = [
        column(
            title_of(pair).split(),
            [f"{ratio_of(found[c]):.2f}" if c in found else "" for c in cases],
        )
        for pair, found in columns
    ]
    parts = [left]
    for one in right:
        if sum(len(each[-1]) + 2 for each in (*parts[-1], one)) > WIDTH:
            parts.append(left[:1])
        parts[-1] = [*parts[-1], one]
    return [line for part in parts for line in join_columns(part)]


def column(
    head: list[str], cells: list[str], align: Callable[..., str] = str.rjust
) -> list[str]:
    """Return the lines of one column, all equally wide."""
    width = max(map(len, (*head, *cells)))
    return [align(cell, width) for cell in (*head, *cells)]


def join_columns(columns: list[list[str]]) -> list[str]:
    """Return the lines of columns side by side, aligned at the bottom."""
    most = max(map(len, columns))
    full = [[" " * len(c[-1])] * (most - len(c)) + c for c in columns]
    return ["  ".join(cells).rstrip() for cells in zip(*full, strict=True)]


def _bars(columns: list[tuple[Pair, Found]]) -> list[str]:
    """Return a line for each required ratio, and one for each control."""
    verdicts = []
    for pair, found in columns:
        asked = {c: 1.0 if pair.control else pair.bar(r) for c, r in found.items()}
        for bar in dict.fromkeys(bar for bar in asked.values() if bar is not None):
            ratios = {c: ratio_of(r) for c, r in found.items() if asked[c] == bar}
            missed = [case for case, ratio in ratios.items() if ratio > bar]
            seen = f"{min(ratios.values()):.2f}"
            seen += f" to {max(ratios.values()):.2f}" if len(ratios) > 1 else ""
            answer, limit = "no" if missed else "yes", f" at most {bar:g}"
            if pair.control:
                answer, limit, missed = "noise", ", the same twice", []
            words = (
                f"  {answer:6} {pair.variant} over {pair.denominator}{limit}: {seen}"
            )
            words += f"; not in {'; '.join(missed)}" if missed else ""
            verdicts += textwrap.wrap(words, WIDTH, subsequent_indent=" " * 9)
    return verdicts
