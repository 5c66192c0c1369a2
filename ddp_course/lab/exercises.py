"""The frame of the exercises: run the reader's own function, answer with a hint.

    @exercise("global_rank", solution=solutions.global_rank)
    def check_global_rank(answer):
        \"""One line: what is asked.\"""
        expect(answer(2, 3, 4) == 11, hint="2 nodes of 4 ranks come first, and 3 ranks")
        return "one rank"  # what was verified

`check_global_rank(global_rank)` then shows one of three verdicts: not attempted yet,
not yet (with the hint of the first expectation that fails), or passed. Whatever the
reader's function does, the cell neither raises nor hangs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from IPython.display import Markdown

from ddp_course.lab.answers import (
    Answer,
    Hint,
    Untouched,
    code,
    error_line,
    one_line,
)
from ddp_course.lab.source import show_source

UNTOUCHED, NOT_YET, PASSED = "not attempted yet", "not yet", "passed"
SIGNS = {UNTOUCHED: "○", NOT_YET: "✗", PASSED: "✓"}


@dataclass(frozen=True)
class Verdict:
    """What a check says. `status` is one of UNTOUCHED, NOT_YET and PASSED."""

    name: str
    status: str
    message: str

    def _repr_markdown_(self) -> str:
        sign = SIGNS[self.status]
        return f"{sign} **{self.name}: {self.status}.** {self.message}"

    def __repr__(self) -> str:
        return self._repr_markdown_().replace("**", "")


class Exercise:
    """A question, its check, and a solution. Call it with your function to check it."""

    def __init__(self, name: str, check: Callable, solution: Callable) -> None:
        functools.update_wrapper(self, check)
        self.name = name
        self.check = check
        self.reference = solution

    @property
    def question(self) -> str:
        """What is asked, in one line."""
        return (self.__doc__ or "").strip().partition("\n")[0]

    def __call__(self, answer: Any = None) -> Verdict:
        """Check `answer`, a function, and say how it went. Never raises."""
        try:
            verified = self.check(Answer(self.name, answer))
        except Untouched:
            todo = (
                "Put your code in place of `raise NotImplementedError`, and run again."
            )
            return Verdict(self.name, UNTOUCHED, todo)
        except Hint as hint:
            return Verdict(self.name, NOT_YET, str(hint))
        except Exception as error:  # of the check, about what it was given
            what = (
                f"The check cannot use what your function returned: {error_line(error)}"
            )
            return Verdict(self.name, NOT_YET, code(what))
        return Verdict(self.name, PASSED, f"Verified: {verified}.")

    def solution(self) -> Markdown:
        """Show a solution."""
        return show_source(self.reference)

    def _repr_markdown_(self) -> str:
        return f"**Exercise {self.name}.** {self.question}"


def exercise(name: str, *, solution: Callable) -> Callable[[Callable], Exercise]:
    """Make an exercise of a check: a function that gets the reader's answer.

    The check's docstring is the question. It calls the answer, states what it expects
    with `expect` and `expect_call`, and returns what it has verified, in a few words.
    """
    return lambda check: Exercise(name, check, solution)


def expect(condition: Any, hint: str) -> None:
    """Go on if `condition` holds; otherwise end the check with `hint`."""
    if not condition:
        raise Hint(hint)


def expect_call(answer: Answer, *args: Any, returns: Any, because: str) -> None:
    """Expect `answer(*args)` to return `returns`; the hint ends with `because`."""
    got, wanted = one_line(answer(*args)), one_line(returns)
    # Compared as written: 11.0 and True are not 11, and a tensor cannot object to ==.
    expect(
        got == wanted,
        f"{answer.call(*args)} returned {code(got)}; expected {code(wanted)}, "
        f"because {because}.",
    )
