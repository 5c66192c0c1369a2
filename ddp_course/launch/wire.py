"""Which messages of this process are delayed, to emulate the slow links of a cluster.

A sender asks `line_to(rank)` for the slow line to that rank. The launcher installs the
lines in each rank that was started with slow links (`lines.install`); senders import
only this file. Chapter 01.
"""

from collections.abc import Callable
from typing import Any

_lines: list[Callable[[int], Any]] = []  # at most one function


def use_lines(line_to: Callable[[int], Any]) -> None:
    """Install the function that returns the slow line to a rank, or None."""
    _lines[:] = [line_to]


def line_to(rank: int) -> Any:
    """Return the slow line to `rank`; None if its messages are not delayed.

    A line has `send(start, nbytes)`, which calls `start` later and returns a handle,
    and `pass_by(nbytes)`, which sleeps as long as a message takes (`lines.Line`).
    """
    return _lines[0](rank) if _lines else None
