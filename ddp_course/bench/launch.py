"""The time of a launch: `spawn` beside `torch.multiprocessing.spawn`.

Both do the same on the same number of ranks, with one thread per rank and over the
loopback interface. Each runs in its own process (`launch_process`), so that the imports
of one do not help the other.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from ddp_course.bench.turns import Contender, Pair, Row, in_turns, row
from ddp_course.launch import LaunchError
from ddp_course.launch.rendezvous import loopback_interface

ABOUT = "A launch of ranks by our `spawn`, and by `torch.multiprocessing.spawn`."
SCRIPT = Path(__file__).with_name("launch_process.py")
CASES = {
    "all_reduce": "process group, one all_reduce",
    "step": "DDP and AdamW, one step",
}
# Ranks -> turns. A launch of eight ranks by PyTorch takes up to ten seconds.
TURNS = {2: 7, 4: 9, 8: 3}
PAIRS = (Pair("spawn", "torch.multiprocessing.spawn"),)


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each case and number of ranks, and one for the first launch."""
    with LaunchProcess("ours") as ours, LaunchProcess("theirs") as theirs:
        ours.launch("step", 4)  # warm-up: a notebook's later launches are measured
        for ranks, turns in ({2: 1, 4: 1} if quick else TURNS).items():
            for case, words in CASES.items():
                both = (partial(p.launch, case, ranks) for p in (ours, theirs))
                yield _row(f"{ranks} ranks, {words}", both, turns)
    first = (partial(first_launch, side) for side in ("ours", "theirs"))
    yield _row("first launch", first, 1 if quick else 5)


def _row(case: str, both: Iterator[Contender], turns: int) -> Row:
    times, _ = in_turns(dict(enumerate(both)), turns, repeat=0)
    ours, theirs = map(statistics.median, times.values())
    return row(case, PAIRS[0], "seconds", ours, theirs)


def first_launch(side: str) -> float:
    """Return the seconds from the first import to the end of the first launch."""
    with LaunchProcess(side) as process:
        process.launch("all_reduce", 4)
        return process.since_start


class LaunchProcess(subprocess.Popen):
    """A fresh Python that launches ranks on demand, by either launcher.

    `since_start` are the seconds from its first import to the end of the last launch.
    The process ends when its input is closed, at the end of a `with`. After an error,
    such as Ctrl-C, it is killed with all processes that it has started.
    """

    def __init__(self, side: str) -> None:
        self.side, self.since_start = side, 0.0
        super().__init__(
            [sys.executable, str(SCRIPT), side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # keeps Ctrl-C away; it ends when its input closes
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback_interface()},
        )

    def __exit__(self, kind: type | None, *error: object) -> None:
        """End the process; do not wait for a launch whose time nobody reads."""
        if kind is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        super().__exit__(kind, *error)

    def launch(self, case: str, ranks: int) -> float:
        """Return the seconds of one launch; raise LaunchError if it failed."""
        try:
            print(case, ranks, file=self.stdin, flush=True)
            seconds, self.since_start = map(float, self.stdout.readline().split())
        except (BrokenPipeError, ValueError):
            raise LaunchError(f"a launch of {self.side} failed") from None
        return seconds
