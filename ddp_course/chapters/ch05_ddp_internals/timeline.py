"""Recorded events in a window of time: what each rank did, to be zoomed. Chapter 05."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from ddp_course.lab.draw.bars import PLOT_W, draw_axis, draw_bar, time_window, visible
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.per_rank import communicates
from ddp_course.lab.palette import MUTED, rank_color

MARGIN, NAME_W, TOP = 16, 70, 62
LANE, THIN, MOST_LINES, RANK_GAP = 20, 13, 6, 12


def bucket_numbers(events: Iterable[Any]) -> dict[int, int]:
    """Return which bucket an event is about: id(event) -> bucket.

    Our own collectives do not know of buckets; but a rank's buckets are launched one
    after the other, so its k-th message belongs to its k-th launch.
    """
    by_rank = defaultdict(list)
    for event in sorted(events, key=lambda e: e.start):
        by_rank[event.rank].append(event)
    numbers = {}
    for mine in by_rank.values():
        for event in mine:
            if "bucket" in event.detail:
                numbers[id(event)] = event.detail["bucket"]
        launched = [numbers.get(id(e)) for e in mine if e.lane == "launch"]
        messages = [e for e in mine if communicates(e)]
        if len(launched) == len(messages):
            for event, number in zip(messages, launched, strict=True):
                numbers.setdefault(id(event), number)
    return {key: number for key, number in numbers.items() if number is not None}


def timeline(
    events: Iterable[Any], start: float = 0.0, width: float | None = None
) -> Drawing:
    """Draw what each rank did between `start` and `start + width`, in ms.

    Time is counted from the earliest event; without a width, to the last. Computing is
    solid and above, a backward lighter, launching dark, waiting blank; communication
    is hatched and below, several messages at once below each other. What is narrower
    than a pixel is drawn one pixel wide. `events` are `measure.Event`s of any ranks.
    Raises ValueError for no events, a start below 0 and a width that is not above 0.
    """
    events = sorted(events, key=lambda e: (e.rank, e.start, e.end))
    if not events:
        raise ValueError("there are no events; at least one must be drawn")
    first, width = min(e.start for e in events), time_window([events], start, width)
    ranks = sorted({event.rank for event in events})
    lines = {rank: _lines([e for e in events if e.rank == rank]) for rank in ranks}
    high = {rank: _height(lines[rank]) for rank in ranks}
    bottom = TOP + sum(high.values()) + RANK_GAP * len(ranks)
    per_ms = PLOT_W / width
    numbers = bucket_numbers(events)
    said = f"from {start:g} to {start + width:.4g} ms"
    d = Drawing(
        NAME_W + PLOT_W + 2 * MARGIN,
        bottom + 74,
        title=f"What the ranks did {said}",
        description=_in_words(events, first, start, width),
    )
    d.text(MARGIN, 26, d.title, size=15, bold=True, anchor="start")
    words = "lighter: backward; dark: launching a bucket; hatched: on its way; "
    d.text(MARGIN, 46, words + "blank: waiting", size=12, anchor="start", fill=MUTED)
    y, many = float(TOP), 0
    with d.shifted(MARGIN + NAME_W, 0):
        label = "time since the first event [ms]"
        draw_axis(d, 0, bottom, PLOT_W, width, label, start=start, grid=TOP - 6)
        for rank in ranks:
            _name(d, rank, y)
            for top, tall, line in lines[rank]:
                bars = visible(line, first + start / 1e3, per_ms * 1e3)
                many += sum(n for *_, n in bars if n > 1)
                for left, right, event, _ in bars:
                    labels = _labels(event, numbers.get(id(event)))
                    draw_bar(d, left, y + top, right - left, tall, event, labels)
            y += high[rank] + RANK_GAP
    words = (
        f"A pixel is {width / PLOT_W:.2g} ms; what is shorter is drawn one pixel wide."
    )
    if many:
        words += f" {many} events share their pixel with others."
    if not any(lies_in(e, first, start, width) for e in events):
        last = (max(e.end for e in events) - first) * 1e3
        words = f"Nothing was recorded here; the last event ends at {last:.4g} ms."
    d.text(MARGIN, bottom + 62, words, size=11, anchor="start", fill=MUTED)
    return d


def lies_in(event: Any, first: float, start: float, width: float) -> bool:
    """Tell whether some of an event lies in the window; `first` in s, the rest ms."""
    begin = first + start / 1e3
    return event.end >= begin and event.start <= begin + width / 1e3


def _lines(mine: Sequence[Any]) -> list[tuple[float, float, list[Any]]]:
    """Lay a rank's events on lines: (top, height, events) for each, not overlapping.

    One line for what it does itself, and below it as many for messages as are under
    way at once, at most six: on the last one, those that do not fit are joined.
    """
    own = [event for event in mine if not communicates(event)]
    sent: list[list[Any]] = []
    for event in filter(communicates, mine):
        free = next((line for line in sent if line[-1].end <= event.start), None)
        if free is not None:
            free.append(event)
        elif len(sent) < MOST_LINES:
            sent.append([event])
        else:
            last = sent[-1].pop()
            many = last.detail.get("messages", 1) + 1
            end = max(last.end, event.end)
            sent[-1].append(
                replace(last, op=f"{many} messages", end=end, detail={"messages": many})
            )
    tall = LANE if len(sent) == 1 else THIN
    places = [(0.0, float(LANE), own)]
    places += [(LANE + 2 + k * (tall + 1), tall, line) for k, line in enumerate(sent)]
    return places


def _height(lines: Sequence[tuple[float, float, list]]) -> float:
    top, tall, _ = lines[-1]
    return top + tall


def _name(d: Drawing, rank: int, y: float) -> None:
    color = rank_color(rank)
    d.block(-NAME_W, y, 56, LANE, f"rank {rank}", fill=color, size=12)


def _labels(event: Any, number: int | None) -> list[str]:
    """Return what may be written on an event, from long to short."""
    if number is None:
        return [event.op]
    names = [f"{event.op}, bucket {number}", f"bucket {number}", f"{number}"]
    return names[communicates(event) :]  # hatching tells the rest


def _in_words(events: Sequence[Any], first: float, start: float, width: float) -> str:
    seen = [e for e in events if lies_in(e, first, start, width)]
    what = Counter((e.rank, e.op) for e in seen)
    says = "; ".join(f"rank {r}: {n} × {op}" for (r, op), n in sorted(what.items()))
    return (
        f"Of {len(events)} recorded events, {len(seen)} lie in the window from "
        f"{start:g} ms, {width:.4g} ms wide. {says or 'None'}."
    )
