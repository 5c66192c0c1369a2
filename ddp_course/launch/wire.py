"""The way out of this process: as it is, or over the slow lines of an emulated cluster.

A message asks `line_to(rank)` whether it has to take its time. The launcher installs
the lines in each rank that was started with slow links (`lines.install`); whoever sends
imports this file alone. Chapter 01.
"""

from collections.abc import Callable
from typing import Any

_lines: list[Callable[[int], Any]] = []  # of this process: none, or one


def use_lines(line_to: Callable[[int], Any]) -> None:
    """Let `line_to(rank)` return the slow line to a rank; None if there is none."""
    _lines[:] = [line_to]


def line_to(rank: int) -> Any:
    """Return the slow line that leads to `rank`; None if messages take no extra time.

    A line has `send(start, nbytes)`, which calls `start` later and returns a handle,
    and `pass_by(nbytes)`, which waits as long as a message takes (`lines.Line`).
    """
    return _lines[0](rank) if _lines else None
