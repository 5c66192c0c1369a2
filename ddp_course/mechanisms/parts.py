"""Parts: objects whose methods a strategy calls at certain moments.

A strategy has a list of `parts`. At each of its moments, such as "before_forward", it
calls `announce`, which calls the method of that name of every part that has one, in the
order of the list. So checks, records and recovery need no line in the strategy itself.
Chapter 05.
"""

from collections.abc import Iterable
from typing import Any


def announce(parts: Iterable[Any], moment: str, *args: Any) -> None:
    """Call `part.<moment>(*args)` of every part that has such a method."""
    for part in parts:
        method = getattr(part, moment, None)
        if method is not None:
            method(*args)
