"""How long a launch takes: `spawn` beside `torch.multiprocessing.spawn`.

Both do the same on the same number of ranks, with one thread for each rank and over the
loopback interface. Each lives in a process of its own (`launch_process`), so that what
one has imported does not help the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ddp_course.bench.rows import Row, interleaved, row
from ddp_course.commands import CommandError
from ddp_course.launch.rendezvous import loopback_interface

SCRIPT = Path(__file__).with_name("launch_process.py")
CASES = {
    "all_reduce": "process group, one all_reduce",
    "step": "DDP and AdamW, one step",
}
REPETITIONS = {2: 7, 4: 9, 8: 3}  # one of theirs takes up to ten seconds
FIRST = 5


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each case and number of ranks, and one for the first launch."""
    repetitions = {2: 1, 4: 1} if quick else REPETITIONS
    with LaunchProcess("ours") as ours, LaunchProcess("theirs") as theirs:
        ours.launch("step", 4)  # warm, as it is for a reader's second cell
        for ranks, times in repetitions.items():
            for case, words in CASES.items():
                medians = interleaved(
                    partial(ours.seconds, case, ranks),
                    partial(theirs.seconds, case, ranks),
                    times,
                )
                yield row("launch", f"{ranks} ranks, {words}", "seconds", *medians)
    medians = interleaved(
        partial(first_launch, "ours"),
        partial(first_launch, "theirs"),
        1 if quick else FIRST,
    )
    yield row("launch", "first launch", "seconds", *medians)


def first_launch(side: str) -> float:
    """Return the seconds from the first import to the end of the first launch."""
    with LaunchProcess(side) as process:
        return process.launch("all_reduce", 4)[1]


class LaunchProcess:
    """A fresh Python that launches ranks in "our" or in "their" way when told to."""

    def __init__(self, side: str) -> None:
        self.side = side
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for us; without us its input ends
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": loopback_interface(),
            },
        )

    def seconds(self, case: str, ranks: int) -> float:
        """Return the seconds of one launch."""
        return self.launch(case, ranks)[0]

    def launch(self, case: str, ranks: int) -> tuple[float, float]:
        """Return the seconds of one launch, and those since the process's first import.

        Raises CommandError if it failed; why stands on stderr.
        """
        try:
            print(case, ranks, file=self.process.stdin, flush=True)
            seconds, since_start = self.process.stdout.readline().split()
        except (BrokenPipeError, ValueError):
            raise CommandError(f"a launch of {self.side} failed") from None
        return float(seconds), float(since_start)

    def __enter__(self) -> LaunchProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()  # no more launches: it ends
        self.process.stdout.close()
        self.process.wait()
