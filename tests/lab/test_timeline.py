"""The timeline of recorded events, and the lanes of which all timelines are made."""

from dataclasses import dataclass, replace

import pytest
from drawings import fills, problems, rects, words

from ddp_course.lab import rank_color
from ddp_course.lab.draw.lanes import (
    BLOCK,
    MARGIN,
    NAME_W,
    PALER,
    PLOT_W,
    Block,
    Lane,
    Run,
    draw_runs,
    in_words,
)
from ddp_course.lab.draw.timeline import timeline
from ddp_course.lab.palette import lighter
from ddp_course.measure import Event

EVENTS = [
    event
    for rank in range(3)
    for event in (
        Event(rank, "forward", 5.0, 5.02),
        Event(rank, "backward", 5.02, 5.05),
        Event(rank, "wait", 5.05, 5.06, lane="wait"),
        Event(rank, "all_reduce", 5.06, 5.09, 400),
    )
]
BESIDE = [Event(0, "backward", 0, 1), Event(0, "bucket", 0.2, 0.4, 8)]


@dataclass
class Plain:
    """An event without a lane."""

    rank: int
    op: str
    start: float
    end: float
    nbytes: int = 0


def drawn(drawing, unit):
    """The blocks of a picture: (y, start, end, dashed), in the events' time."""
    left = MARGIN + NAME_W
    return [
        (y, (x - left) * unit, (x - left + wide) * unit, "stroke-dasharray" in e.attrib)
        for x, y, wide, high, e in rects(drawing)
        if high == BLOCK and not e.get("rx")
        if x > left - 0.1 and y < drawing.height - 60
    ]


def faults(drawing, events):
    """Where the blocks are not those of the events, each in its rank's lane."""
    first = min(e.start for e in events)
    last = max(e.end for e in events)
    blocks = drawn(drawing, (last - first) / PLOT_W)
    tops = sorted({y for y, *_ in blocks})
    wanted = [
        (tops[e.rank], e.start - first, e.end - first, e.op == "wait") for e in events
    ]
    for block, want in zip(sorted(blocks), sorted(wanted), strict=True):
        if block != pytest.approx(want, abs=1e-4):
            yield f"{block} instead of {want}"


def test_a_timeline_has_a_lane_for_each_rank():
    drawing = timeline(EVENTS[::-1])
    assert list(faults(drawing, EVENTS)) == []
    assert list(problems(drawing)) == []
    colors = [rank_color(rank) for rank in range(3)]
    assert fills(drawing, "forward") == colors
    paler = [lighter(color, PALER["B"]) for color in colors]
    assert fills(drawing, "backward")[:3] == paler
    assert words(drawing).count("all_reduce") == 3
    assert {"time [ms]", "communicates", "waits"} <= set(words(drawing))
    assert "rank 2: forward backward wait all_reduce" in drawing.description


def test_a_wrong_timeline_is_seen():
    late = [replace(e, end=e.end - 0.004) if e.op == "backward" else e for e in EVENTS]
    assert list(faults(timeline(late), EVENTS))
    other = [replace(e, rank=2 - e.rank) if e.op == "wait" else e for e in EVENTS[:8]]
    assert list(faults(timeline(other), EVENTS[:8]))


def test_communication_beside_computing_has_a_lane_below_it():
    above, below = drawn(timeline(BESIDE), 1 / PLOT_W)
    assert above[0] + BLOCK < below[0]
    assert below[1:3] == pytest.approx((0.2, 0.4))


def test_a_block_that_the_next_one_covers_has_no_name():
    """Else a piece of it stands beside the next block, as of `gloo:all_reduce`."""
    events = [Plain(0, "send", 0, 3), Plain(0, "recv", 2, 5), Plain(0, "gather", 5, 6)]
    shown = words(timeline(events))
    assert "send" not in shown and {"recv", "gather"} <= set(shown)
    assert "send" in words(timeline([replace(events[0], end=2), *events[1:]]))


def test_what_is_hatched():
    events = [
        Plain(0, "recv", 0, 1),
        Plain(0, "all_gather, ring", 1, 2.5),
        Plain(0, "compute", 2.5, 3),
        Plain(0, "bucket 1", 3, 4, nbytes=1),
        Event(0, "step 2", 4, 5, lane="communication"),
    ]
    drawing = timeline(events)
    grounds = {e.op: fills(drawing, e.op)[-1].upper() for e in events}
    assert [op for op, fill in grounds.items() if fill != "#FFFFFF"] == ["compute"]


def test_words_are_made_of_the_blocks():
    blocks = [Block(k, k + 1, names=("F",), alt=f"F{k // 2}") for k in range(100)]
    lane = Lane("rank 0", 0, blocks, "note")
    said = in_words(Run([lane], "run", "slow"))
    assert said.startswith("run: slow. rank 0: 2 times F0 2 times F1 ")
    assert said.endswith("2 times F39 and 10 more (note).")


def test_short_blocks_of_one_pixel_are_one():
    blocks = [Block(k / 1e4, (k + 1) / 1e4) for k in range(100)] + [Block(5, 10)]
    drawing = draw_runs("t", [Run([Lane("rank 0", 0, blocks)])], "time", 10)
    assert len(drawn(drawing, 10 / PLOT_W)) == 2


def test_a_timeline_of_nothing():
    with pytest.raises(ValueError, match="no events; at least one"):
        timeline([])
