"""Parts: what a strategy announces its moments to.

A strategy has a list of `parts`, objects that it does not know otherwise. At each of
its moments, such as "before_forward", it calls `announce`, and every part that has a
method of that name is called, in the order of the list. So checks, records and
recovery are added to a strategy without a line in it. Chapter 05.
"""

from collections.abc import Iterable
from typing import Any


def announce(parts: Iterable[Any], moment: str, *args: Any) -> None:
    """Call `part.<moment>(*args)` of every part that has such a method."""
    for part in parts:
        method = getattr(part, moment, None)
        if method is not None:
            method(*args)
