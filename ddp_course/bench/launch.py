"""How long a launch takes: `spawn` beside `torch.multiprocessing.spawn`.

Both do the same on the same number of ranks, with one thread for each rank and over the
loopback interface. Each lives in a process of its own (`launch_process`), so that what
one has imported does not help the other.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ddp_course.bench.turns import Contender, Pair, Row, in_turns, row
from ddp_course.commands import CommandError
from ddp_course.launch.rendezvous import loopback_interface

ABOUT = "A launch of ranks by our `spawn` over one by `torch.multiprocessing.spawn`."
SCRIPT = Path(__file__).with_name("launch_process.py")
CASES = {
    "all_reduce": "process group, one all_reduce",
    "step": "DDP and AdamW, one step",
}
TURNS = {2: 7, 4: 9, 8: 3}  # one of theirs takes up to ten seconds
PAIRS = (Pair("", "", title="spawn", over="torch.multiprocessing.spawn"),)


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each case and number of ranks, and one for the first launch."""
    sides = ("ours", "theirs")
    with LaunchProcess("ours") as ours, LaunchProcess("theirs") as theirs:
        ours.launch("step", 4)  # warm, as it is for a reader's second cell
        for ranks, turns in ({2: 1, 4: 1} if quick else TURNS).items():
            for case, words in CASES.items():
                contenders = {
                    process.side: lambda p=process, c=case, n=ranks: p.launch(c, n)[0]
                    for process in (ours, theirs)
                }
                yield _row(f"{ranks} ranks, {words}", contenders, turns)
    first = {side: lambda side=side: first_launch(side) for side in sides}
    yield _row("first launch", first, 1 if quick else 5)


def _row(case: str, contenders: dict[str, Contender], turns: int) -> Row:
    times, _ = in_turns(contenders, turns, repeat=0)
    ours, theirs = (statistics.median(times[side]) for side in ("ours", "theirs"))
    return row("launch", case, "seconds", ours, theirs)


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
