"""Avoid the four milliseconds that some of gloo's messages take.

In every rank a thread of gloo reads from and writes to the sockets. It shares a lock
with the thread that calls `isend` or `irecv`; if the lock is taken, gloo's thread tries
again and again without sleeping (`handleEvents` in gloo's transport/tcp/pair.cc). When
Linux lets it interrupt the thread that has the lock, on the same core, it tries until
its time slice ends: 3 to 4 ms in which nothing happens. Two ranks that send to each
other at the same moment provoke this, as in every step of a ring. Measured on two
cores: with 32 KiB each way, up to half of all exchanges took 4 ms instead of 0.1 ms.

A thread under the policy SCHED_BATCH does not interrupt others when it wakes up; it
waits until a core is free or the other's time slice ends. So while this rank only waits
for messages, gloo's threads run under that policy: on an otherwise idle machine, the
4 ms are gone. This needs Linux, but no privileges; and PyTorch 2.13 or later: in 2.12
the thread has no name by which to find it. (PyTorch's own collectives over gloo would
gain as much: `ddp-course bench all-reduce` measures that as "gloo, patient".)
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

NAME = "gloo_tcp_loop"
AVAILABLE = hasattr(os, "SCHED_BATCH") and torch.__version__ >= "2.13"


def socket_threads(tasks: Path = Path("/proc/self/task")) -> list[int]:
    """Return the ids of gloo's socket threads in this process."""
    found = []
    for task in tasks.glob("[0-9]*") if AVAILABLE else ():
        with contextlib.suppress(OSError):  # a thread that has just ended
            if (task / "comm").read_text().strip() == NAME:
                found.append(int(task.name))
    return found


def threads_of(owner: Any) -> list[int]:
    """Return the ids of gloo's socket threads, looked up once for a group.

    `owner`, the group's meeting or communicator, keeps them.
    """
    if "socket threads" not in owner.kept:
        owner.kept["socket threads"] = socket_threads()
    return owner.kept["socket threads"]


@contextlib.contextmanager
def patient(threads: list[int]) -> Iterator[None]:
    """Schedule these threads so that they interrupt no others, inside the block."""
    _schedule(threads, "SCHED_BATCH")
    try:
        yield
    finally:
        _schedule(threads, "SCHED_OTHER")


def _schedule(threads: list[int], policy: str) -> None:
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, getattr(os, policy), os.sched_param(0))
