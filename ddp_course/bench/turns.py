"""Measure any number of contenders in turns within one run, and compare them in rows.

Machines are noisy: another program can take half of the cores for a minute, and a
contender's caches and queues slow the next one. So all contenders are measured in every
turn, each after a call that does not count; each pair of turns has a new order and its
reverse. A time is that of the slowest rank, and a ratio is the median of the ratios
within each turn. Turns during which other programs took much of the machine are left
out, if enough turns remain; `others` in the rows is the share of the machine that other
programs took in the turns that count.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOUD, ENOUGH = 0.15, 6  # largest CPU share of other programs; fewest calm turns
Contender = Callable[[], object]  # runs once; may return seconds that it measured
Times = dict[str, list[float]]
Row = dict[str, Any]  # one comparison of a bench, see `row`
Clocks = tuple[float, float, float]  # seconds, see `read_clocks`
Timings = tuple[Times, list[Clocks]]  # seconds by contender and turn; clocks by turn


@dataclass(frozen=True)
class Pair:
    """A comparison of two variants: a row for each case, a column of the table.

    Attributes:
        variant: the variant whose time (or bytes) is the numerator.
        denominator: the variant whose time the numerator is divided by.
        at_most: the required ratio: a number, or {tokens: number}.
        title: the column's title; by default the variant.
        over: the denominator's name in the table's title; by default `denominator`.
        control: whether both are the same code, so that the ratio shows the noise.
    """

    variant: str
    denominator: str
    at_most: float | Mapping[int, float] | None = None
    title: str = ""
    over: str = ""
    control: bool = False

    def bar(self, row: Row) -> float | None:
        """Return the required ratio in the case of `row`, or None."""
        if isinstance(self.at_most, Mapping):
            return self.at_most.get(row.get("tokens"))
        return self.at_most


def against(
    denominator: str, variants: Mapping[str, float | Mapping[int, float] | None]
) -> list[Pair]:
    """Return pairs of each variant with `denominator`.

    `variants` maps a name to the required ratio, or None. A variant whose name ends in
    "again" is a control.
    """
    return [
        Pair(variant, denominator, at_most, control=variant.endswith("again"))
        for variant, at_most in variants.items()
    ]


def row(
    case: str, pair: Pair, metric: str, ours: float, theirs: float, **more: Any
) -> Row:
    """Return a row; its ratio is ours / theirs: below 1 is better for times.

    `metric` is the unit of `ours` and `theirs`: "seconds", "bytes". `more` are further
    fields for tables and figures, such as a size.
    """
    fields = {"case": case, "variant": pair.variant, "denominator": pair.denominator}
    fields |= {"metric": metric, "ours": ours, "theirs": theirs}
    return fields | {"ratio": ours / theirs} | more


def in_turns(
    contenders: Mapping[str, Contender],
    turns: int,
    repeat: int = 1,
    *,
    meet: Callable[[], object] = lambda: None,
    go_on: Callable[[], bool] = lambda: True,
) -> Timings:
    """Call every contender in each of at most `turns` turns; return seconds per call.

    Args:
        contenders: functions by name; a float that a call returns is its seconds.
        turns: the largest number of turns.
        repeat: calls of each contender in a turn, after a warm-up call; 0 means one
            call without a warm-up.
        meet: called before the clock starts; a barrier of the ranks.
        go_on: called before every turn after the third; False ends the measurement. It
            must return the same on all ranks.
    """
    times: Times = {name: [] for name in contenders}
    usage: list[Clocks] = []
    for turn in range(turns):
        if turn >= 3 and not go_on():
            break
        before = read_clocks()
        order = random.Random(turn // 2).sample(list(contenders), len(contenders))
        for name in reversed(order) if turn % 2 else order:
            call = contenders[name]
            if repeat:
                call()  # not timed: caches and queues are the previous contender's
            meet()
            start = time.perf_counter()
            for _ in range(max(1, repeat)):
                measured = call()
            seconds = (time.perf_counter() - start) / max(1, repeat)
            times[name].append(measured if isinstance(measured, float) else seconds)
        usage.append(tuple(b - a for a, b in zip(before, read_clocks(), strict=True)))
    return times, usage


def slowest(timings: Sequence[Timings]) -> tuple[Times, float]:
    """Return the slowest rank's times in the turns that count, and the others' share.

    A turn counts if other programs took at most `LOUD` of the machine. If fewer than
    `ENOUGH` turns do, all turns count. The share is the median of what other programs
    took in the turns that count.
    """
    shares = [share(list(turn)) for turn in zip(*(o for _, o in timings), strict=True)]
    calm = [turn for turn, others in enumerate(shares) if others <= LOUD]
    turns = calm if len(calm) >= ENOUGH else range(len(shares))
    times = {
        name: [max(of_rank[name][turn] for of_rank, _ in timings) for turn in turns]
        for name in timings[0][0]
    }
    return times, statistics.median(shares[turn] for turn in turns)


def rows_of(
    case: str, pairs: Iterable[Pair], timings: Sequence[Timings], **more: Any
) -> Iterator[Row]:
    """Yield the rows of one case, for pairs of variants that were both measured.

    `paired` is the median of the ratios of each turn.
    """
    times, others = slowest(timings)
    for pair in pairs:
        if pair.variant in times and pair.denominator in times:
            both = times[pair.variant], times[pair.denominator]
            paired = statistics.median(a / b for a, b in zip(*both, strict=True))
            also = more | {"paired": paired, "turns": len(both[0]), "others": others}
            yield row(case, pair, "seconds", *map(statistics.median, both), **also)


# ---- the share of other programs ---------------------------------------------------


def read_clocks() -> Clocks:
    """Return CPU seconds of this process, CPU seconds of all, and the time."""
    return time.process_time(), machine_seconds(), time.perf_counter()


def machine_seconds(stat: Path = Path("/proc/stat")) -> float:
    """Return the seconds for which the machine's cores have been busy since its start.

    They include user, nice, system, interrupt and stolen time, but no waits for a disk.
    """
    try:
        words = stat.read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, *stolen = map(int, words[1:])
    ticks = user + nice + system + irq + softirq + sum(stolen[:1])
    return ticks / os.sysconf("SC_CLK_TCK")


def share(usage: list[Clocks], cores: int | None = None) -> float:
    """Return the share of the machine (0 to 1) that other programs used.

    `usage` has (own, busy, wall) seconds of one turn in each process of the bench.
    """
    wall = max(wall for _, _, wall in usage)
    busy = max(busy for _, busy, _ in usage)
    ours = sum(own for own, _, _ in usage)
    return max(0.0, busy - ours) / (wall * (cores or os.cpu_count() or 1))
