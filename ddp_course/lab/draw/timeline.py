"""Timelines of recorded events: when each rank computed, communicated and waited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import Block, Lane, Run, draw_runs

COMMUNICATION = (
    "send", "recv", "isend", "irecv", "broadcast", "scatter", "gather", "reduce",
    "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "barrier",
)  # fmt: skip
LEGEND = {"F": "computes", "B": "backward", "sent": "communicates", "waits": "waits"}


def timeline(events: Iterable[Any]) -> Drawing:
    """Draw recorded events: a lane for each rank, rank 0 on top, time in ms.

    Events have the attributes rank, op, start and end (in seconds), and nbytes, such as
    `measure.Event`. An event is hatched if its lane is "communication", if it sent
    bytes, or if it has the name of a collective. If ranks compute and communicate at
    the same time, each has two lanes. Raises ValueError if there are no events.
    Chapters 02 and 05.
    """
    events = sorted(events, key=lambda e: (e.rank, e.start))
    if not events:
        raise ValueError("there are no events; at least one must be drawn")
    first = min(e.start for e in events)
    long = (max(e.end for e in events) - first) * 1e3 or 1.0
    groups = [("", events)]
    if _overlap(events):
        groups = [("", [e for e in events if not communicates(e)])]
        groups += [("sends", [e for e in events if communicates(e)])]
    lanes = []
    for rank in sorted({e.rank for e in events}):
        for name, some in groups:
            blocks = [block_of(e, first) for e in some if e.rank == rank]
            lanes.append(Lane(name or f"rank {rank}", rank, blocks, boxed=not name))
    return draw_runs(
        "What each rank did, and when", [Run(lanes)], "time [ms]", long, legend=LEGEND
    )


def block_of(event: Any, first: float) -> Block:
    """Return the block of an event, in ms since `first`."""
    waits = getattr(event, "lane", "") == "wait" or event.op in ("wait", "idle")
    look = "B" if "backward" in event.op else "F"
    look = "sent" if communicates(event) else "waits" if waits else look
    times = (event.start - first) * 1e3, (event.end - first) * 1e3
    return Block(*times, look, (event.op, event.op.rpartition(".")[2]))


def communicates(event: Any) -> bool:
    """Return whether an event is communication; all others are computing."""
    if getattr(event, "lane", "") == "communication" or event.nbytes > 0:
        return True
    return event.op.partition(",")[0].split(".")[-1] in COMMUNICATION


def _overlap(events: Sequence[Any]) -> bool:
    """Return whether some rank computes and communicates at the same time."""
    drawn = [e for e in events if e.op not in ("idle", "wait")]
    sends = [e for e in drawn if communicates(e)]
    computes = [e for e in drawn if not communicates(e)]
    return any(
        a.rank == b.rank and max(a.start, b.start) < min(a.end, b.end)
        for a in sends
        for b in computes
    )
