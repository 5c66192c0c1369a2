"""The barrier at which the ranks of one machine compare their calls, in microseconds.

`collectives/__init__.py` adds `find_barrier` to `meeting.BARRIER_FINDERS`, so `meeting`
need not know of shared memory. Explained in chapter 02.
"""

import contextlib
import os
from typing import TYPE_CHECKING

import psutil

from ddp_course.collectives.allocator import container
from ddp_course.collectives.memory_barrier import Barrier
from ddp_course.launch.deadlock import ranks_in_words

if TYPE_CHECKING:
    from ddp_course.collectives.meeting import Meeting


def find_barrier(meeting: "Meeting") -> Barrier | None:
    """Return a barrier in shared memory; None if the ranks cannot share memory.

    All ranks of the meeting call it together. While a rank waits at the barrier, it
    checks whether the late ranks can still come.
    """
    where = meeting.exchange((container(), os.getpid()))  # one per rank
    containers, processes = zip(*where, strict=True)
    if None in containers or len(set(containers)) > 1:
        return None

    def follow(late: list[int] | None) -> None:
        """Check, while the barrier waits, whether the ranks `late` can still come."""
        if late is None:
            meeting.watch.end_wait()
            return
        meeting.watch([meeting.ranks[index] for index in late])
        gone = [index for index in late if has_ended(processes[index])]
        if gone and meeting.watch.is_long():
            names = ranks_in_words([meeting.ranks[index] for index in gone])
            raise RuntimeError(f"{names} of this group: the process has ended")

    with contextlib.suppress(OSError):  # raised on all ranks or on none
        return Barrier(meeting.rank, meeting.size, meeting.exchange, watch=follow)
    return None


def has_ended(process: int) -> bool:
    """Return whether a process of this machine has ended (or is a zombie)."""
    try:
        return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
