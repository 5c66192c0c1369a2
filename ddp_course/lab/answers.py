"""The reader's function, called safely: what goes wrong becomes one clear line.

In the notebook's own process a call has a deadline; on ranks the launcher sees to that.
A function that still raises NotImplementedError is no mistake: it is not written yet.

Models that a check should try are in `lab/hard.py`, drawn numbers in `lab/judge.py`.
Memory counts in all storages: `living_bytes()` of `lab/exercises.py`, before and after;
bytes are counted by `written_by`. What trains takes two steps, with
`zero_grad(set_to_none=False)` between them.
"""

from __future__ import annotations

import builtins
import os
import re
import signal
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ddp_course.launch import LaunchError, RankError, spawn, stacks
from ddp_course.launch.packing import cell_labels

TIMEOUT = 20.0  # seconds, for a call and for a launch, if a core has few processes
OURS = ("ddp_course/lab/", "ddp_course/chapters/")  # no line of the reader's
CRASH = re.compile("killed by SIG(ABRT|SEGV)")
MIXED_UP = (
    "So ends a process whose message or collective meets one of another type or size: "
    "print `dtype` and `shape` on every rank."
)


class Hint(Exception):
    """Something is not right; the text says what, and what to look at."""


class Untouched(Exception):
    """The function still says `raise NotImplementedError`."""


class Answer:
    """The reader's function; if a call of it fails, that becomes a `Hint`."""

    def __init__(self, name: str, function: Any) -> None:
        if not callable(function):
            raise Hint(
                f"Give the check your function itself, not what it returns: "
                f"`check_{name}({name})`."
            )
        self.name = name
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Return what the function returns."""
        seconds = patient(TIMEOUT)
        try:
            with _deadline(seconds):
                return self.function(*args)
        except KeyboardInterrupt:  # the stop button
            raise
        except _TooLong:
            what = f"{self.call(*args)} had not returned after {seconds:.3g} s."
            raise Hint(what) from None
        except BaseException as error:  # sys.exit(), too
            what, where = error_line(error), _where(error)
            if _is_stub(what, where):
                raise Untouched from None
            what = f"{self.call(*args)} raised {code(what)}{_at(where)}."
            raise Hint(what) from None

    def call(self, *args: Any) -> str:
        """Write a call of the function as code: `global_rank(2, 3, 4)`."""
        return code(f"{self.name}({', '.join(map(one_line, args))})")


def on_ranks(fn: Callable, *args: Any, hint: str = "", **shape: int) -> list[Any]:
    """Call `fn(*args)` on real ranks; if they fail or hang, say where, and add `hint`.

    (But not to a mistake that Python names: a NameError has nothing to do with it.)
    `shape` is `world_size`, or `nnodes` and `nproc_per_node`. In place of an `Answer`
    the ranks get the reader's bare function: there the launcher tells what happens.
    """
    bare = [arg.function if isinstance(arg, Answer) else arg for arg in args]
    try:
        timeout = patient(TIMEOUT)
        return spawn(fn, *bare, timeout=timeout, output="none", device="cpu", **shape)
    except RankError as error:
        if any(_is_stub(report.error or "", report.where) for report in error.reports):
            raise Untouched from None
        places = {report.rank: _at(report.where) for report in error.reports}
        at = places.get(error.rank) or next(filter(None, places.values()), "")
        what = f"On real ranks: {code(error.headline)}{at}. {_advice(error, hint)}"
        raise Hint(what.strip()) from None
    except LaunchError as error:
        raise Hint(f"The ranks could not be started: {code(str(error))}.") from None


def _advice(error: RankError, hint: str) -> str:
    """Return the hint that fits how the ranks failed: the exercise's, if any does."""
    if error.rank is None:  # nobody alone is to blame
        return hint
    failed = error.reports[error.rank]
    if CRASH.search(failed.error or ""):
        return MIXED_UP
    kind = getattr(builtins, (failed.error or "").partition(":")[0], None)
    named = isinstance(kind, type) and not issubclass(kind, (RuntimeError, OSError))
    return "" if named and _at(failed.where) else hint


def one_line(value: Any, longest: int = 80) -> str:
    """Write any value in one line, the same on every run."""
    try:
        text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))
    except Exception:
        text = f"<{type(value).__name__}>"
    if len(text) <= longest:
        return text
    if hasattr(value, "shape"):
        return f"<{type(value).__name__} of shape {tuple(value.shape)}>"
    return f"{text[: longest - 3]}..."


def tell(text: object) -> None:
    """Print a text in lines that a page has room for: of 96 characters at most."""
    for line in f"{text}".splitlines():
        print(textwrap.fill(line, 96, subsequent_indent="    ", break_long_words=False,
                            break_on_hyphens=False))  # fmt: skip


def code(text: str) -> str:
    """Write `text` as code, in Markdown."""
    return f"`{text.replace('`', chr(39))}`"


def error_line(error: BaseException) -> str:
    """Write an exception in one line: "ValueError: ..."."""
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def _where(error: BaseException) -> str | None:
    """Return the reader's line in which `error` was raised, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, frame.lineno, frame.line) for frame in frames]
    return stacks.innermost(lines, cell_labels())


def _at(where: str | None) -> str:
    """Write where the reader's code stood: ", in line 2: `x = y`"."""
    if not where or where.startswith(OURS):
        return ""
    place, _, line = where.partition(": ")
    place = re.sub(r"^Cell In\[\d+\], ", "", place)  # nbval counts cells differently
    return f", in {place}" + (f": {code(line)}" if line else "")


def _is_stub(error: str, where: str | None) -> bool:
    """Tell whether a function failed because nobody has written it yet."""
    by_hand = where is None or "raise NotImplementedError" in where
    return error.startswith("NotImplementedError") and by_hand


def patient(seconds: float) -> float:
    """Return the seconds, or more where a class works: over 4 processes for a core."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0
    return seconds * max(1, load / (4 * (os.cpu_count() or 1)))


class _TooLong(BaseException):
    """The deadline has passed. No `except Exception` of the reader's stops it."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt the code inside after `seconds`, where signals can do that."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)
