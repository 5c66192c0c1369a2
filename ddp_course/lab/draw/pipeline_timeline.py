"""Timelines of pipelines, simulated and recorded ones on the same axis.

Chapters 09, 10 and 11.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.lanes import PLOT_W, Block, Lane, Run, draw_runs, room_for
from ddp_course.theory.checks import check_positive

OPS = {  # the operations of `pipeline.Action`
    "F": "forward",
    "B": "backward",
    "I": "input's gradient",
    "W": "weights' gradients",
}
SHORT = {word: op for op, word in OPS.items()}  # for recorded events: "forward" is F


@dataclass(frozen=True)
class Work:
    """One computation of a rank, from `start` to `end`.

    `op` is one of `OPS`, or another name. `stage` and `microbatch` are None for a
    computation that has none.
    """

    rank: int
    op: str
    stage: int | None
    microbatch: int | None
    start: float
    end: float

    @property
    def names(self) -> tuple[str, ...]:
        """The names that may be written on its block, from long to short."""
        if self.microbatch is None:
            word = OPS.get(self.op, self.op)
            return (word,) if word == self.op else (word, self.op)
        return f"{self.op}{self.microbatch}", f"{self.microbatch}"


def works_of(events: Iterable[Any], unit: float = 1.0) -> list[Work]:
    """Return the computations of all ranks, sorted by rank and start.

    `events` are of one of two kinds. Events of `pipeline.simulate` have an action;
    their times are multiplied by `unit`. The times of `measure.Event`s become ms; their
    `detail` may name stage and microbatch, and only those of the lane "compute" are
    used. Raises ValueError if no event is a computation, or if `unit` is not above 0.
    """
    check_positive("unit", unit)
    works = []
    for event in events:
        if hasattr(event, "action"):
            a, start, end = event.action, float(event.start), float(event.end)
            about = a.op, a.stage, a.microbatch
            works.append(Work(event.rank, *about, start * unit, end * unit))
        elif event.lane == "compute":
            op = SHORT.get(event.op, event.op)
            about = op, event.detail.get("stage"), event.detail.get("microbatch")
            works.append(Work(event.rank, *about, event.start * 1e3, event.end * 1e3))
    if not works:
        raise ValueError("nothing was computed; there must be an event to draw")
    return sorted(works, key=lambda work: (work.rank, work.start, work.end))


def window(works: Sequence[Work]) -> tuple[float, float]:
    """Return the times of the first start and of the last end, on any rank."""
    return min(work.start for work in works), max(work.end for work in works)


def gaps(works: Sequence[Work], rank: int) -> list[tuple[float, float]]:
    """Return the (start, end) of each time in the window when `rank` was idle."""
    now, end = window(works)
    found = []
    for work in works:
        if work.rank == rank:
            if work.start > now:
                found.append((now, work.start))
            now = max(now, work.end)
    return [*found, (now, end)] if end > now else found


def idle_share(works: Sequence[Work], rank: int | None = None) -> float:
    """Return the idle share of the window on a rank; None: the mean of all ranks."""
    start, end = window(works)
    ranks = ranks_of(works) if rank is None else [rank]
    idle = sum(b - a for one in ranks for a, b in gaps(works, one))
    return idle / (len(ranks) * (end - start)) if end > start else 0.0


def ranks_of(works: Sequence[Work]) -> list[int]:
    """Return the ranks that computed anything, smallest first."""
    return sorted({work.rank for work in works})


def chunks_of(works: Sequence[Work]) -> Mapping[tuple[int, int | None], int]:
    """Return {(rank, stage): the stage's place among the rank's stages, from 0 on}."""
    own: dict[int, set[int]] = {}
    for work in works:
        if work.stage is not None:
            own.setdefault(work.rank, set()).add(work.stage)
    return {
        (rank, stage): chunk
        for rank, stages in own.items()
        for chunk, stage in enumerate(sorted(stages))
    }


def run_of(
    works: Sequence[Work],
    long: float,
    title: str = "",
    says: str = "",
    notes: Mapping[int, str] | None = None,
) -> Run:
    """Return a run with a lane for each rank, waiting included, from time 0 on.

    `long` is the length of the axis; `notes` is {rank: text}. A rank's second stage is
    drawn lower than its first. Either all blocks show their operation, or none does.
    """
    begin, chunks = window(works)[0], chunks_of(works)
    numbered = [work for work in works if work.microbatch is not None]
    letters = all(
        room_for(work.names[0]) + 2 < (work.end - work.start) * PLOT_W / long
        for work in numbered
    )
    lanes = []
    for rank in ranks_of(works):
        blocks = [
            Block(a - begin, b - begin, "waits", ("waits",))
            for a, b in gaps(works, rank)
            if b - a > 1e-9 * long  # more than a rounding error
        ]
        for work in (work for work in works if work.rank == rank):
            names = work.names[not letters and work in numbered :]
            alt = f"{work.stage}{work.names[0]}" if work in numbered else ""
            look = work.op if work.op in OPS else "F"
            times = work.start - begin, work.end - begin
            lower = chunks.get((rank, work.stage), 0)
            blocks.append(Block(*times, look, names, alt, lower))
        blocks.sort(key=lambda block: block.start)
        lanes.append(Lane(f"rank {rank}", rank, blocks, (notes or {}).get(rank, "")))
    return Run(lanes, title, says)


def legend_of(works: Iterable[Work]) -> dict[str, str]:
    """Return the legend of these blocks: {look: words}."""
    halves = any(work.op == "I" for work in works)
    words = OPS | ({"B": "whole backward"} if halves else {})
    return {op: f"{op}: {word}" for op, word in words.items()} | {"waits": "waits"}


def pipeline_timeline(
    runs: Mapping[str, Iterable[Any]] | Iterable[Any],
    unit: float = 1.0,
    title: str = "What each rank computed, and when",
) -> Drawing:
    """Draw when each rank of a pipeline computed what, one run below the other.

    `runs` maps a name such as "measured" to the events of a step, as for `works_of`. An
    iterable of events is one run. A simulated time of 1 lasts `unit` seconds. All runs
    begin at 0 on one axis, which is as long as the longest run. Raises ValueError for
    no runs, no events, and a `unit` that is not above 0. Chapters 10 and 11.
    """
    named = runs if isinstance(runs, Mapping) else {"recorded": runs}
    if not named:
        raise ValueError("there are no runs; at least one must be drawn")
    works = {name: works_of(events, unit * 1e3) for name, events in named.items()}
    longest = max(b - a for a, b in map(window, works.values()))
    drawn = []
    for name, its in works.items():
        start, end = window(its)
        lasts = f"{end - start:.4g} ms, {idle_share(its):.1%} of it waiting"
        notes = {rank: f"waits {idle_share(its, rank):.1%}" for rank in ranks_of(its)}
        drawn.append(run_of(its, longest, name and f"{name}: {lasts}", notes=notes))
    legend = legend_of(work for its in works.values() for work in its)
    return draw_runs(title, drawn, "time [ms]", longest, legend=legend)


def who_works(events: Iterable[Any]) -> Drawing:
    """Draw which ranks compute and which ones wait, for one run. Chapter 09.

    `events` are `measure.Event`s; only those of the lane "compute" are drawn. Raises
    ValueError if there are none.
    """
    return pipeline_timeline({"": events}, title="Who works, and who waits")
