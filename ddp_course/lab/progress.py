"""A check's verdict is noted in the learner's copy of the course, and nowhere else."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from IPython.display import Markdown

from ddp_course.learners_copy import FILE, better, copy_around, reached, summary


def note(name: str, status: str) -> None:
    """Note how the check of an exercise went, if it never went as well before.

    A note is one line, added by one write: kernels that note at the same time lose
    nothing. In a clone nothing is noted; and whatever goes wrong, the cell goes on.
    """
    with suppress(OSError):  # a full disk, a folder of somebody else's
        copy = copy_around()
        if copy and better(status, reached(copy).get(name)):
            # Begun with a newline: half a line of a full disk spoils no other.
            line = f"\n{json.dumps([name, status])}".encode()
            file = os.open(copy / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(file, line)
            finally:
                os.close(file)


def progress() -> Markdown:
    """Say how far the learner is; `ddp-course progress` tells it in full."""
    with suppress(OSError):
        if copy := copy_around():
            told = summary(reached(copy))
            return Markdown(f"{told} (Chapter by chapter: `ddp-course progress`.)")
    return Markdown(
        "Nothing is noted here: this is no copy that `ddp-course lab` has made."
    )
