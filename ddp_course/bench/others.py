"""How much of the machine other programs took while something was measured."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Others:
    """Counts, from its making on, the time that this process and all others used.

    `own` and `busy` are seconds of CPU: of this process with all its threads, and of
    the whole machine (Linux; 0 elsewhere). `wall` are seconds of the clock.
    """

    def __init__(self) -> None:
        self._start = self._look()

    def _look(self) -> tuple[float, float, float]:
        return time.process_time(), machine_seconds(), time.perf_counter()

    def told(self) -> tuple[float, float, float]:
        """Return (own, busy, wall) since the last time, and start anew."""
        now = self._look()
        spans = tuple(b - a for a, b in zip(self._start, now, strict=True))
        self._start = now
        return spans


def machine_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Return the seconds for which the machine's cores have been busy since its start.

    User, nice, system, interrupt and stolen time; waiting for a disk is not work.
    """
    try:
        words = stat.read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, *stolen = map(int, words[1:])
    ticks = user + nice + system + irq + softirq + sum(stolen[:1])
    return ticks / os.sysconf("SC_CLK_TCK")


def share(told: list[tuple[float, float, float]], cores: int | None = None) -> float:
    """Return the part of the machine (0 to 1) that was neither idle nor ours.

    `told` is what `Others.told` returned in each of our processes.
    """
    wall = max(wall for _, _, wall in told)
    busy = max(busy for _, busy, _ in told)
    ours = sum(own for own, _, _ in told)
    return max(0.0, busy - ours) / (wall * (cores or os.cpu_count() or 1))
