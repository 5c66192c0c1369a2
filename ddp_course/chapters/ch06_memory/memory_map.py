"""A map of a toy allocator's memory, block by block. Chapter 06."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddp_course.chapters.ch06_memory.caching_allocator import (
    MIB,
    CachingAllocator,
    ExpandableAllocator,
    OutOfMemoryError,
    Segment,
    play,
)
from ddp_course.lab.draw.drawing import Drawing
from ddp_course.lab.draw.kinds import KIND_LOOKS
from ddp_course.lab.palette import MUTED, PANEL_EDGE

WIDE, SCALE, GAP = 42, 16, 0.25  # MiB in a row, pixels of a MiB, MiB between segments
MARGIN, TOP, HIGH, ROW = 12, 60, 24, 34
THIN = 3 / SCALE  # MiB: smaller blocks are drawn as one, without edges
TENSOR, SMALL_TENSOR = KIND_LOOKS["optimizer states"], KIND_LOOKS["gradients"]
FOOT = "Grey: tensors, darker in the small pool. White: free. Thick: the largest hole."
Span = tuple[float, float]  # MiB: begin and end


def memory_map(
    requests: Sequence[tuple[int, int]],
    moment: int | None = None,
    expandable: bool = False,
    capacity: int | None = None,
) -> Drawing:
    """Draw a toy allocator's segments and blocks after it has served a log's requests.

    With a capacity, the allocator may stop at the first request that it cannot serve.
    Then the drawing shows that moment.

    Args:
        requests: `MemoryLog.requests`.
        moment: the number of requests to serve; None means all.
        expandable: draw an `ExpandableAllocator` instead of a `CachingAllocator`.
        capacity: bytes of the device; None means no limit.

    Raises ValueError for a moment that is not in the log. Chapter 06.
    """
    moment = len(requests) if moment is None else moment
    if not 0 <= moment <= len(requests):
        raise ValueError(
            f"moment is {moment}; the log has {len(requests)} requests, so it can be 0 "
            f"to {len(requests)}"
        )
    allocator = (ExpandableAllocator if expandable else CachingAllocator)(capacity)
    when = f"after {moment:,} requests"
    try:
        play(requests[:moment], allocator)
    except OutOfMemoryError:
        when = "out of memory"
    name = "Expandable segments" if expandable else "Segments of fixed size"
    sizes = allocator.reserved, allocator.allocated, sum(allocator.holes)
    says = "{:.1f} MiB reserved, {:.1f} allocated, {:.1f} free; largest hole: {:.1f}"
    says = says.format(*(nbytes / MIB for nbytes in (*sizes, allocator.largest)))
    starts, end = places(allocator.segments)
    rows = -int(-end // WIDE)
    d = Drawing(
        WIDE * SCALE + 2 * MARGIN,
        TOP + max(rows, 1) * ROW + 20,
        title=f"{name}, {when}",
        description=f"{says}. There are {len(allocator.segments)} segments.",
    )
    d.text(MARGIN, 24, d.title, size=14, bold=True, anchor="start")
    d.text(MARGIN, 44, says, size=12, anchor="start")
    for segment, start in zip(allocator.segments, starts, strict=True):
        _draw_segment(d, segment, start, allocator.largest)
    d.text(MARGIN, d.height - 10, FOOT, size=11, anchor="start", fill=MUTED)
    return d


def places(segments: Sequence[Segment]) -> tuple[list[float], float]:
    """Return where each segment begins, in MiB from the first row on, and the end.

    A segment begins a new row if it fits into a row, but not into the current row.
    """
    starts, at = [], 0.0
    for segment in segments:
        wide = segment.nbytes / MIB
        if at % WIDE + wide > WIDE >= wide:
            at = (at // WIDE + 1) * WIDE
        starts.append(at)
        at += wide + GAP
    return starts, at - GAP


def runs(segment: Segment) -> Iterator[Span]:
    """Yield the ranges of used blocks; thin neighbours are joined to one range."""
    begin = end = 0.0
    for block in segment.blocks:
        wide = block.nbytes / MIB
        if end > begin and (block.storage is None or max(wide, end - begin) > THIN):
            yield begin, end
            begin = end
        end += wide
        if block.storage is None:
            begin = end
    if end > begin:
        yield begin, end


def _draw_segment(d: Drawing, segment: Segment, start: float, largest: int) -> None:
    look = SMALL_TENSOR if segment.small else TENSOR
    whole = start, start + segment.nbytes / MIB
    _draw(d, whole, fill="#FFFFFF", stroke=PANEL_EDGE)
    for begin, end in runs(segment):
        edge = look.edge if end - begin > THIN else "none"
        _draw(d, (start + begin, start + end), fill=look.fill, stroke=edge)
    at = start
    for block in segment.blocks:
        end = at + block.nbytes / MIB
        if block.storage is None and block.nbytes == largest:
            _draw(d, (at, end), stroke_width=3)
        at = end


def _draw(d: Drawing, span: Span, **look: object) -> None:
    """Draw a range of memory; continue in the next rows if it is long."""
    begin, end = span
    while end - begin > 1e-9:
        row = int(begin // WIDE)
        stop = min(end, (row + 1) * WIDE)
        x, y = MARGIN + (begin - row * WIDE) * SCALE, TOP + row * ROW
        d.rect(x, y, (stop - begin) * SCALE, HIGH, **look)
        begin = stop
