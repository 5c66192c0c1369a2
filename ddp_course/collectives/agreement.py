"""Before anything is sent: do all ranks mean the same?

Every rank writes down what it is about to do, or what is wrong with its arguments, and
reads what the others wrote (`Communicator.agree`). This is how such notes are judged:
on every rank alike, as all have the same notes. Explained in chapter 02.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

PROBLEM = "!"  # the first letter of a note that tells of a problem
SHOWN = " \0"  # between what must be equal and what is only shown


class CollectiveError(ValueError):
    """The ranks' calls of a collective do not fit together; nothing was sent.

    Every rank of the group raises it, with the same text.
    """


def note(words: str, problem: str | None, show: Any) -> str:
    """Return what a rank shows the others: its words and more, or its problem."""
    if problem:
        return PROBLEM + problem
    return words if show is None else f"{words}{SHOWN}{show!r}"


def read(notes: Sequence[str], ranks: Sequence[int]) -> list[Any]:
    """Return what every rank shows beside its words, if these are equal.

    Raises CollectiveError if a rank has a problem, or if the words differ.
    """
    problems = {r: n for r, n in zip(ranks, notes, strict=True) if n[:1] == PROBLEM}
    if problems:
        told = by_text({rank: text[1:] for rank, text in problems.items()})
        raise CollectiveError(f"{told}. Nothing was sent.")
    words, shown = zip(*(n.partition(SHOWN)[::2] for n in notes), strict=True)
    if len(set(words)) > 1:
        told = by_text(dict(zip(ranks, words, strict=True)))
        wrong = f"the ranks do not call the same. {told}"
        raise CollectiveError(f"{wrong}. Nothing was sent.")
    return [ast.literal_eval(value) if value else None for value in shown]


def by_text(told: dict[int, str]) -> str:
    """Write who says what, ranks with the same text together."""
    who: dict[str, list[int]] = {}
    for rank, text in told.items():
        who.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' * (len(those) > 1)} {', '.join(map(str, those))}: {text}"
        for text, those in who.items()
    )
