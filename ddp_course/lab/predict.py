"""Predict, then measure: a number that the reader writes down before it is known."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from IPython.display import Markdown

from ddp_course.lab.beliefs import BELIEFS, Guess

CLOSE = 0.1  # a prediction within 10 % is close
ROUNDED = 0.01  # guesses within 1 % of each other count as the same
ONE = {"bytes": "byte", "messages": "message", "ranks": "rank", "steps": "step"}


class Prediction:
    """A question whose answer is a number, and the reader's guess.

    >>> sent = Prediction("How many bytes does each rank send?", 24, unit="bytes")
    >>> sent.compare(measured=36, theory=36)

    A guess of None means that nothing has been written down yet. A text such as
    "1,024", "3/4" or "24 bytes" is read as a number; any other text, such as "a lot",
    is shown as it is. `lab/beliefs.py` has common wrong guesses for each question.
    """

    def __init__(
        self, question: str, guess: float | str | None = None, *, unit: str = ""
    ) -> None:
        self.question = question
        self.unit = unit
        self.guess(guess)

    def guess(self, value: float | str | None) -> Prediction:
        """Set the reader's guess. Raises TypeError or ValueError for an invalid one."""
        if isinstance(value, str):
            value = _read(value, self.unit)
        words = isinstance(value, str)
        self._guess = value if words else _amount("your prediction", value)
        return self

    def compare(self, *, measured: Any, theory: Any = None) -> Markdown:
        """Show prediction, measurement and theory side by side.

        The ratios are to the theory or, without one, to the measurement. For a common
        wrong guess, a sentence explains why it is wrong.
        """
        rows = {
            "your prediction": self._guess,
            "measured": _amount("measured", measured),
            "theory": _amount("theory", theory),
        }
        if rows["measured"] is None:
            raise TypeError("measured is None; it must be a number")
        if theory is None:
            del rows["theory"]
        name, truth = list(rows.items())[-1]
        question = self.question.replace("|", "\\|")
        lines = [f"| {question} | | ratio to {name} |", "|:--|--:|--:|"]
        for row, value in rows.items():
            lines.append(f"| {row} | {self._text(value)} | {_ratio(value, truth)} |")
        verdict = self._verdict(truth)
        if isinstance(self._guess, (int, float)) and not _close(self._guess, truth):
            for wrong, why in BELIEFS.get(self.question, {}).items():
                verdict += f" {why}" * _is_guess(wrong, self._guess)
        return Markdown("\n".join(lines) + f"\n\n{verdict}")

    def __repr__(self) -> str:
        return f"Prediction({self.question!r}, {self._guess!r}, unit={self.unit!r})"

    def _repr_markdown_(self) -> str:
        if self._guess is None:
            return (
                f"**Predict.** {self.question} *No number is written down yet: "
                f"put yours in the cell above and run it again.*"
            )
        return f"**Predict.** {self.question} *You say: {self._text(self._guess)}.*"

    def _text(self, value: float | str | None) -> str:
        """Return an amount with its unit: "1,024 bytes"."""
        if value is None:
            return "none"
        if isinstance(value, str):
            return f"“{value}”".replace("|", "\\|")
        unit = ONE.get(self.unit, self.unit) if value == 1 else self.unit
        return f"{_written(value)} {unit}".strip()

    def _verdict(self, truth: float) -> str:
        guess = self._guess
        if guess is None:
            return "No prediction was written down: next time, guess first."
        if isinstance(guess, str):
            return (
                "Your prediction is not a number, so it cannot be compared: the answer "
                f"is {self._text(truth)}."
            )
        if guess == truth:
            return "Your prediction is exactly right."
        if _close(guess, truth):
            return "Your prediction is close: within 10 %."
        if min(guess, truth) == 0:
            return f"Not quite: it is {self._text(truth)}."
        factor = max(guess / truth, truth / guess)
        way = "high" if guess > truth else "low"
        return f"Your prediction is too {way} by a factor of {_written(factor, 2)}."


def _close(guess: float, truth: float) -> bool:
    return max(guess, truth) <= (1 + CLOSE) * min(guess, truth)


def _is_guess(wrong: Guess, guess: float) -> bool:
    least, most = wrong if isinstance(wrong, tuple) else (wrong, wrong)
    return least * (1 - ROUNDED) <= guess <= most * (1 + ROUNDED)


def _read(text: str, unit: str) -> Fraction | int | str:
    """Return the number in a text, with or without its unit; else the text."""
    number = text.strip().removesuffix(unit).strip()
    if re.fullmatch(r"[1-9]\d{0,2}([,_]\d{3})+(\.\d*)?", number):  # thousands
        number = number.replace(",", "").replace("_", "")
    try:
        exact = Fraction(number.replace(",", "."))  # 0,75 is three quarters
    except (ValueError, ZeroDivisionError):
        return " ".join(text.split()) or "nothing"
    return int(exact) if exact.denominator == 1 else exact


def _amount(name: str, value: Any) -> float | None:
    """Return `value` as a number of 0 or more, or None; raise for anything else."""
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        value = value.item()  # a scalar of torch or numpy
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; write a number, such as 12")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be a number, 0 or more")
    return int(value) if isinstance(value, Integral) else float(value)


def _ratio(value: float | str | None, truth: float) -> str:
    none = value is None or isinstance(value, str) or truth == 0
    return "" if none else _written(value / truth, 3)


def _written(value: float, digits: int = 4) -> str:
    """Format a number with `digits` significant digits, and all before the point."""
    if value == int(value) or value >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
