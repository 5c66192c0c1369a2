"""Recorded steps of stage 3 below each other: what prefetching hides. Chapter 08."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import Lane, Run, draw_runs
from ddp_course.lab.draw.timeline import block_of, communicates
from ddp_course.measure import busy, overlap

LANES = ("all-gather", "compute", "reduce-scatter")
SHORT = {"forward": "fwd", "backward": "bwd", "all-gather": "", "reduce-scatter": ""}


def fsdp_timeline(
    runs: Mapping[str, Iterable[Any]],
    rank: int = 0,
    start: float = 0.0,
    width: float | None = None,
) -> Drawing:
    """Draw recorded steps below each other, on one scale: one rank's three lanes.

    `runs` maps a name such as "prefetch 1" to the `measure.Event`s of one step that was
    recorded under `zero.FullyShardedDataParallel`. Each run begins at its first event;
    `start` and `width` in ms are the window. Messages are hatched, a backward is
    lighter, waiting is dashed. Raises ValueError for no runs, a rank without events and
    a window that cannot be. Chapter 08.
    """
    mine = {
        name: sorted((e for e in events if e.rank == rank), key=lambda e: e.start)
        for name, events in runs.items()
    }
    if not mine:
        raise ValueError("there are no runs; at least one must be drawn")
    for name, events in mine.items():
        if not events:
            raise ValueError(f"the run {name!r} has no events of rank {rank}")
    if not 0 <= start < math.inf:
        raise ValueError(f"start is {start!r}; it must be a time in ms, 0 or more")
    if width is None:
        longest = max(max(e.end for e in its) - its[0].start for its in mine.values())
        width = max(longest * 1e3 - start, 1e-3)
    if not 0 < width < math.inf:
        raise ValueError(f"width is {width!r}; it must be a time in ms, above 0")
    drawn = [
        Run([_lane(events, lane, rank) for lane in LANES], name, in_words(events))
        for name, events in mine.items()
    ]
    return draw_runs(
        f"Steps of rank {rank}, unit by unit",
        drawn,
        "time since the step began [ms]",
        width,
        start=start,
        name_w=112,
    )


def in_words(events: Sequence[Any]) -> str:
    """Say how long a step took, and how much of its communication was hidden."""
    total = (max(e.end for e in events) - events[0].start) * 1e3
    sent = busy(events, "communication") * 1e3
    cut = [e for e in events if e.lane == "communication"] + computing(events)
    hidden = overlap(cut, "compute", "communication") * 1e3
    return f"{total:.3g} ms, communication {sent:.3g} ms, hidden {hidden:.3g} ms"


def computing(events: Sequence[Any]) -> list[Any]:
    """Return what was computed, cut where the rank waited in the middle of it."""
    waits = [e for e in events if e.lane == "wait"]
    pieces = []
    for event in (e for e in events if e.lane == "compute"):
        start = event.start
        for wait in sorted(waits, key=lambda e: e.start):
            if start < wait.end and wait.start < event.end:
                if wait.start > start:
                    pieces.append(replace(event, start=start, end=wait.start))
                start = wait.end
        if start < event.end:
            pieces.append(replace(event, start=start))
    return pieces


def lane_of(event: Any) -> str:
    """Return in which of the lanes an event is drawn, or "" for none."""
    if communicates(event):
        return "reduce-scatter" if "reduce" in event.op else "all-gather"
    return "compute" if event.lane in ("compute", "wait") else ""


def units_of(events: Sequence[Any]) -> dict[int, Any]:
    """Return which unit an event is about: id(event) -> unit.

    A collective does not know of units, but a rank's messages are sent in the order in
    which `zero.FullyShardedDataParallel` asked for them. It asks for more than is sent:
    what is whole already needs no message. If the counts do not match, the messages
    keep their secret.
    """
    units = {id(e): e.detail["unit"] for e in events if "unit" in e.detail}
    gathers = [e for e in events if lane_of(e) == "all-gather"]
    for freed in ("blocks and root", "blocks", ""):  # after forward
        asked = _gathered(events, freed)
        if len(asked) == len(gathers):
            units |= zip(map(id, gathers), asked, strict=True)
            break
    reduces = [e for e in events if lane_of(e) == "reduce-scatter"]
    asked = list(
        dict.fromkeys(e.detail["reduce"] for e in events if "reduce" in e.detail)
    )
    if len(asked) == len(reduces):
        units |= zip(map(id, reduces), asked, strict=True)
    return units


def _gathered(events: Sequence[Any], freed: str) -> list[Any]:
    """Return the units that had to be gathered, if those were `freed` after forward."""
    told = []  # (time, order, what, unit)
    for event in events:
        unit = event.detail.get("unit")
        if event.op in ("forward", "backward"):
            told.append((event.end, 0, event.op, unit))
        elif "gather" in event.detail:
            told.append((event.start, 1, "gather", event.detail["gather"]))
        elif event.lane == "wait" and unit is not None:
            told.append((event.start, 1, "gather", unit))
    last = max((t for t in told if t[2] == "forward"), default=None)
    whole, asked = set(), []
    for entry in sorted(told, key=lambda t: t[:2]):
        _, _, what, unit = entry
        if what == "gather" and unit not in whole:
            whole.add(unit)
            asked.append(unit)
        elif what == "backward" or (what == "forward" and freed):
            whole.discard(unit)
        if entry is last and "root" in freed:
            whole.discard("root")
    return asked


def _lane(events: Sequence[Any], name: str, rank: int) -> Lane:
    units = units_of(events)
    line = [e for e in events if lane_of(e) == name]
    if name == "compute":
        line = computing(events) + [e for e in events if e.lane == "wait"]
        line.sort(key=lambda e: e.start)
    blocks = []
    for event in line:
        unit = units.get(id(event), event.detail.get("unit"))
        blocks.append(block_of(event, events[0].start, _labels(event, unit, name)))
    return Lane(name, rank, blocks, boxed=False)


def _labels(event: Any, unit: Any, lane: str) -> list[str]:
    """Return what may be written on an event, from long to short."""
    if event.lane == "wait":
        return ["wait"]
    if unit is None:
        return [event.op] if lane == "compute" else []
    last = f"{unit}".rpartition(".")[2]
    if lane != "compute":
        return [f"{unit}", last]
    short = SHORT.get(event.op, event.op)
    return [f"{event.op} {unit}", f"{event.op} {last}", f"{short} {last}", last]
