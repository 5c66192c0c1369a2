"""Call the reader's function safely: every failure becomes one clear line.

In the notebook's own process a call has a deadline; on ranks the launcher enforces one.
A function that still raises NotImplementedError is not wrong, but not yet written.

For authors of checks: models to try are in `lab/hard.py`, drawn numbers in
`lab/judge.py`. Measure memory with `living_bytes()` of `lab/exercises.py`, before and
after, and sent bytes with `written_by`. A check of training takes two steps, with
`zero_grad(set_to_none=False)` between them.
"""

from __future__ import annotations

import builtins
import functools
import re
import signal
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ddp_course.launch import LaunchError, RankError, spawn, stacks
from ddp_course.launch.packing import cell_labels
from ddp_course.launch.parent import patient

TIMEOUT = 20.0  # seconds for a call or a launch; `patient` adds more under load
COURSE_FILES = ("ddp_course/lab/", "ddp_course/chapters/")  # not the reader's code
CRASH = re.compile("killed by SIG(ABRT|SEGV)")
# PyTorch's own messages explain these errors; an exercise's hint would only distract.
EXPLAINED = re.compile(
    "view size is not compatible|must be a matrix|number of subscripts|grad_dtype"
)
MIXED_UP = (
    "A process crashes in this way if ranks call one collective with tensors of "
    "different types or sizes: print `dtype` and `shape` on every rank."
)
LEFT = "leaves a setting of the whole process changed:"
# {a setting of PyTorch for a whole process: (how to read it, how to set it)}
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "`torch.is_grad_enabled()`": (torch.is_grad_enabled, torch.set_grad_enabled),
    "`torch.get_default_dtype()`": (torch.get_default_dtype, torch.set_default_dtype),
    "`torch.get_num_threads()`": (torch.get_num_threads, torch.set_num_threads),
}


class Hint(Exception):
    """An error in the reader's answer; the text describes it, and where to look."""


class Untouched(Exception):
    """The reader's function is still the stub that raises NotImplementedError."""


class Answer:
    """The reader's function, wrapped so that a failing call raises a `Hint`."""

    def __init__(self, name: str, function: Any) -> None:
        if not callable(function):
            raise Hint(
                f"Give the check your function itself, not what it returns: "
                f"`check_{name}({name})`."
            )
        self.name = name
        self.function = Tidy(function)

    def __call__(self, *args: Any) -> Any:
        """Call the function within the deadline, and return its result."""
        seconds = patient(TIMEOUT)
        try:
            with _deadline(seconds):
                return self.function(*args)
        except (KeyboardInterrupt, Hint):  # the stop button, or `Tidy`'s complaint
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
    """Call `fn(*args)` on real ranks; return their results.

    If they fail or hang, raises a Hint with the reader's line and `hint`; but for an
    error that Python explains, such as a NameError, without `hint`. `shape` is
    `world_size`, or `nnodes` and `nproc_per_node`. The ranks get the reader's bare
    function in place of an `Answer`, since there the launcher reports errors.
    """
    bare = [arg.function if isinstance(arg, Answer) else arg for arg in args]
    try:
        timeout = patient(TIMEOUT)
        return spawn(fn, *bare, timeout=timeout, output="none", device="cpu", **shape)
    except RankError as error:
        if error.rank is not None and LEFT in error.headline:
            raise Hint(error.headline.partition("Hint: ")[2]) from None
        if any(_is_stub(report.error or "", report.where) for report in error.reports):
            raise Untouched from None
        places = {report.rank: _at(report.where) for report in error.reports}
        at = places.get(error.rank) or next(filter(None, places.values()), "")
        what = f"On real ranks: {code(error.headline)}{at}. {_advice(error, hint)}"
        raise Hint(what.strip()) from None
    except LaunchError as error:
        raise Hint(f"The ranks could not be started: {code(str(error))}.") from None


class Tidy:
    """The reader's function; a call raises a `Hint` if it leaves a setting changed."""

    def __init__(self, function: Callable) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; restore settings that it left changed, and complain."""
        before = {name: read() for name, (read, _) in SETTINGS.items()}
        try:
            result = self.function(*args, **kwargs)
        except BaseException:
            _restore(before)
            raise
        if left := _restore(before):
            name = getattr(self.function, "__name__", "your function")
            raise Hint(f"{code(name)} {LEFT} {', '.join(left)}. Set it back.")
        return result


def _restore(before: dict[str, Any]) -> list[str]:
    """Restore the settings in `before`; return the names of those that had changed."""
    left = [name for name, (read, _) in SETTINGS.items() if read() != before[name]]
    for name in left:
        SETTINGS[name][1](before[name])
    return left


def _advice(error: RankError, hint: str) -> str:
    """Return the hint that fits the failure: the exercise's, MIXED_UP, or ""."""
    if error.rank is None:  # no single rank failed: they hang
        return hint
    failed = error.reports[error.rank]
    if CRASH.search(failed.error or ""):
        return MIXED_UP
    if EXPLAINED.search(failed.error or "") and _at(failed.where):
        return ""
    kind = getattr(builtins, (failed.error or "").partition(":")[0], None)
    named = isinstance(kind, type) and not issubclass(kind, (RuntimeError, OSError))
    return "" if named and _at(failed.where) else hint


def one_line(value: Any, longest: int = 80) -> str:
    """Return any value as one line of text, the same in every run."""
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
    """Print a text in lines of at most 96 characters, which fit on a page."""
    for line in f"{text}".splitlines():
        print(textwrap.fill(line, 96, subsequent_indent="    ", break_long_words=False,
                            break_on_hyphens=False))  # fmt: skip


def code(text: str) -> str:
    """Format `text` as code, in Markdown."""
    return f"`{text.replace('`', chr(39))}`"


def error_line(error: BaseException) -> str:
    """Return an exception as one line: "ValueError: ..."."""
    if isinstance(error, SyntaxError):  # its text would begin with the file's name
        return f"{type(error).__name__}: {error.msg}"
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[0]


def _where(error: BaseException) -> str | None:
    """Return the reader's line in which `error` was raised, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [(frame.filename, frame.lineno, frame.line) for frame in frames]
    return stacks.innermost(lines, cell_labels())


def _at(where: str | None) -> str:
    """Return the place in the reader's code as text: ", in line 2: `x = y`"."""
    if not where or where.startswith(COURSE_FILES):
        return ""
    place, _, line = where.partition(": ")
    place = re.sub(r"^Cell In\[\d+\], ", "", place)  # nbval counts cells differently
    return f", in {place}" + (f": {code(line)}" if line else "")


def _is_stub(error: str, where: str | None) -> bool:
    """Return whether a function failed because it is still the stub."""
    by_hand = where is None or "raise NotImplementedError" in where
    return error.startswith("NotImplementedError") and by_hand


class _TooLong(BaseException):
    """The error at the deadline; the reader's `except Exception` does not catch it."""


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Interrupt the code in the block after `seconds`, if signals work here."""
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
