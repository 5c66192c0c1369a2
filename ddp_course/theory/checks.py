"""Checks of names, counts and measurements; and integer logarithms.

Formulas check names and incompatible arguments, but not that each number is positive.
Drawings and schedules check their own numbers with these functions.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Integral, Real


def check_count(name: str, value: int) -> None:
    """Raise ValueError unless `value` is an integer of 1 or more."""
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of 1 or more")


def check_choice(name: str, value: object, known: Collection[object]) -> None:
    """Raise ValueError unless `value` is in `known`."""
    if value not in known:
        choices = ", ".join(map(repr, known))
        raise ValueError(f"{name} is {value!r}; it can be {choices}")


def check_not_negative(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a finite number of 0 or more."""
    if not isinstance(value, Real) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number, 0 or more")


def check_positive(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    if not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r}; it must be a finite number above 0")


def log2_up(n: int) -> int:
    """Return ceil(log2(n)), exactly: the doublings of 1 until it is n or more."""
    return (int(n) - 1).bit_length()


def power_below(n: int) -> int:
    """Return the largest power of two that is not above `n`."""
    return 1 << (int(n).bit_length() - 1)
