"""Record the verdicts on exercises, in the learner's copy and nowhere else."""

from __future__ import annotations

import json
import os
from contextlib import suppress

from ddp_course.learners_copy import (
    FILE,
    STATUSES,
    better,
    copy_around,
    reached,
    summary,
)


def note(name: str, status: str) -> str:
    """Record the verdict on an exercise, unless an earlier one was as good.

    A record is one line, appended by one write, so kernels that write at the same time
    lose nothing. Outside a copy nothing is recorded. An error of the file system never
    stops the cell. Return, for an exercise that has passed in a copy, a sentence with
    the number that have passed and the next one; otherwise "".
    """
    with suppress(OSError):  # a full disk, or another user's folder
        if copy := copy_around():
            if better(status, reached(copy).get(name)):
                # Newline first: a line cut off by a full disk then ruins no later one.
                line = f"\n{json.dumps([name, status])}".encode()
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                file = os.open(copy / FILE, flags, 0o644)
                try:
                    os.write(file, line)
                finally:
                    os.close(file)
            if status == STATUSES[-1]:
                return summary(reached(copy))
    return ""
