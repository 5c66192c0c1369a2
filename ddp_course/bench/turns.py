"""Any number of contenders, measured in turns within one run; and rows of what is seen.

Machines are noisy: another program can take half of the cores for a minute, and what
one contender leaves in caches and queues is not always to the same one's cost. So all
are measured in turns, each pair of turns in a new order and its mirror image, after a
call that does not count. A time is that of the slowest rank, and a ratio the median of
the ratios within each turn. Turns during which other programs took much of the machine
are left out, if enough others remain; `others` in the rows is the part that they took
in those that count.
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

LOUD, ENOUGH = 0.15, 6  # the part of the machine; how many turns
Contender = Callable[[], object]  # does it once; may return seconds that it measured
Times = dict[str, list[float]]
Row = dict[str, Any]  # one comparison of a bench, see `row`
Look = tuple[float, float, float]
Told = tuple[Times, list[Look]]  # seconds by contender and turn; `look` by turn


@dataclass(frozen=True)
class Pair:
    """A comparison: a row of each case, a column of the table, a mark of the figure.

    Attributes:
        variant: whose time (or bytes) is divided.
        beside: by whose.
        at_most: which ratio is asked for: a number, or by tokens.
        title: its name in the table; the variant, unless given.
        over: what a reader calls `beside`; pairs with the same stand together.
        control: both are the same thing: how much of a difference is noise.
    """

    variant: str
    beside: str
    at_most: float | Mapping[int, float] | None = None
    title: str = ""
    over: str = ""
    control: bool = False

    def bar(self, row: Row) -> float | None:
        """Return what is asked for in the case of `row`, or None."""
        if isinstance(self.at_most, Mapping):
            return self.at_most.get(row.get("tokens"))
        return self.at_most


def against(
    beside: str, variants: Mapping[str, float | Mapping[int, float] | None]
) -> list[Pair]:
    """Return pairs of one `beside`: variant -> which ratio is asked for, or None.

    One that is called "again" is a control.
    """
    return [
        Pair(variant, beside, at_most, control=variant.endswith("again"))
        for variant, at_most in variants.items()
    ]


def row(
    case: str, pair: Pair, metric: str, ours: float, theirs: float, **more: Any
) -> Row:
    """Return a row; its ratio is ours / theirs: below 1 is better for times.

    `metric` is the unit of `ours` and `theirs`: "seconds", "bytes". A bench adds what
    else a table or a figure wants to know, such as a size.
    """
    told = {"case": case, "variant": pair.variant, "beside": pair.beside}
    told |= {"metric": metric, "ours": ours, "theirs": theirs}
    return told | {"ratio": ours / theirs} | more


def in_turns(
    contenders: Mapping[str, Contender],
    turns: int,
    repeat: int = 1,
    *,
    meet: Callable[[], object] = lambda: None,
    go_on: Callable[[], bool] = lambda: True,
) -> Told:
    """Call every contender in each of at most `turns` turns; return seconds per call.

    Args:
        contenders: by name; what a call returns counts, if it is a number of seconds.
        turns: how many.
        repeat: calls of each in a turn, after one that does not count unless this is 0;
            then it is called once.
        meet: called before the clock starts: all ranks come together.
        go_on: asked before every turn but the first three; the same on all ranks.
    """
    times: Times = {name: [] for name in contenders}
    told: list[Look] = []
    for turn in range(turns):
        if turn >= 3 and not go_on():
            break
        before = look()
        order = random.Random(turn // 2).sample(list(contenders), len(contenders))
        for name in reversed(order) if turn % 2 else order:
            call = contenders[name]
            if repeat:
                call()  # what the one before has left behind is its affair
            meet()
            start = time.perf_counter()
            for _ in range(max(1, repeat)):
                measured = call()
            seconds = (time.perf_counter() - start) / max(1, repeat)
            times[name].append(measured if isinstance(measured, float) else seconds)
        told.append(tuple(b - a for a, b in zip(before, look(), strict=True)))
    return times, told


def slowest(told: Sequence[Told]) -> tuple[Times, float]:
    """Return the times of the slowest rank in the turns that count; others' share."""
    shares = [share(list(turn)) for turn in zip(*(o for _, o in told), strict=True)]
    calm = [turn for turn, others in enumerate(shares) if others <= LOUD]
    turns = calm if len(calm) >= ENOUGH else range(len(shares))
    times = {
        name: [max(of_rank[name][turn] for of_rank, _ in told) for turn in turns]
        for name in told[0][0]
    }
    return times, statistics.median(shares[turn] for turn in turns)


def rows_of(
    case: str, pairs: Iterable[Pair], told: Sequence[Told], **more: Any
) -> Iterator[Row]:
    """Yield the rows of one case: those of `pairs` of which both were measured.

    `paired` is the median of the ratios of each turn.
    """
    times, others = slowest(told)
    for pair in pairs:
        if pair.variant in times and pair.beside in times:
            both = times[pair.variant], times[pair.beside]
            paired = statistics.median(a / b for a, b in zip(*both, strict=True))
            also = more | {"paired": paired, "turns": len(both[0]), "others": others}
            yield row(case, pair, "seconds", *map(statistics.median, both), **also)


# ---- how much of the machine other programs took -----------------------------------


def look() -> Look:
    """Return the seconds used so far: by this process, by all; and of the clock."""
    return time.process_time(), machine_seconds(), time.perf_counter()


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


def share(told: list[Look], cores: int | None = None) -> float:
    """Return the part of the machine (0 to 1) that was neither idle nor ours.

    `told` are (own, busy, wall) seconds of one turn in each of our processes.
    """
    wall = max(wall for _, _, wall in told)
    busy = max(busy for _, busy, _ in told)
    ours = sum(own for own, _, _ in told)
    return max(0.0, busy - ours) / (wall * (cores or os.cpu_count() or 1))
