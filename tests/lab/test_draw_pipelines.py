"""What several chapters draw: pipelines."""

import itertools
import re
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
from drawings import check_sliders, fills, laid_out, rects, words
from refusals import refused

from ddp_course.lab import rank_color
from ddp_course.lab.draw.lanes import BLOCK, LOWER, PALER, PLOT_W, ROW, SAMPLE
from ddp_course.lab.draw.pipeline_timeline import (
    Work,
    chunks_of,
    gaps,
    idle_share,
    pipeline_timeline,
    who_works,
    works_of,
)
from ddp_course.lab.draw.schedule_view import equal_costs, named, schedule_view
from ddp_course.lab.palette import contrast, lighter
from ddp_course.measure import Event
from ddp_course.pipeline import SCHEDULES, parse
from ddp_course.pipeline.clocks import bubble
from ddp_course.pipeline.schedule import ScheduleError
from ddp_course.pipeline.simulate import simulate_schedule

VIEWS = [
    (name, *numbers)
    for name in SCHEDULES
    for numbers in ((1, 1, 2), (2, 3, 1), (4, 8, 2), (5, 1, 1))
] + [("interleaved", 3, 3, 4), ("interleaved", 8, 16, 2), ("zero_bubble", 8, 16, 1)]


def recorded(name, p, m, unit=0.03, rank0=5.0):
    """A simulated schedule as the ranks of a pipeline would record it."""
    schedule = named(name, p, m)
    for e in simulate_schedule(schedule, equal_costs(schedule)).events:
        a, start, end = e.action, float(e.start), float(e.end)
        yield Event(
            e.rank, a.op, rank0 + start * unit, rank0 + end * unit, lane="compute",
            detail={"stage": a.stage, "microbatch": a.microbatch, "step": 0},
        )  # fmt: skip
        yield Event(e.rank, "send", rank0, rank0 + 9, 8, lane="communication")
        yield Event(e.rank, "wait", rank0, rank0 + 9, lane="wait")


def one_after_the_other(ranks=3, forward=0.02, backward=0.04, at=7.0):
    """What naive model parallelism records."""
    for k in range(ranks):
        start = at + k * forward
        yield Event(k, "forward", start, start + forward, lane="compute")
        start = at + ranks * forward + (ranks - 1 - k) * backward
        yield Event(k, "backward", start, start + backward, lane="compute")


RUNS = {
    "simulated": simulate_schedule(named("1f1b", 4, 8)).events,
    "measured": list(recorded("1f1b", 4, 8)),
    "zero bubble": list(recorded("zero_bubble", 4, 8)),
    "interleaved": list(recorded("interleaved", 4, 8)),
}
test_the_layout = laid_out(
    (schedule_view, VIEWS),
    partial(pipeline_timeline, RUNS, 0.03),
    partial(who_works, list(one_after_the_other())),
)
LEGEND = [lighter(SAMPLE, p) if p else SAMPLE for p in PALER.values()]


def drawn_works(drawing, scale, left, top):
    """The blocks of a picture as (rank, fill, start, end, lower), by rank and start."""
    return [
        (y, e.get("fill"), (x - left) / scale, (x + wide - left) / scale)
        for x, y, wide, high, e in rects(drawing)
        if high == BLOCK and not e.get("rx") and not e.get("stroke-dasharray")
        if y >= top and x >= left - 0.1
    ]


def first_lane(drawing):
    """Where the name of rank 0 stands: the first block with round corners."""
    return next(y for _, y, _, _, e in rects(drawing) if e.get("rx"))


def shown_faults(drawing, schedule, simulated):
    """Where the blocks of a schedule's picture are not those of the simulation."""
    works = works_of(simulated.events)
    chunks = chunks_of(works)
    high = BLOCK + LOWER * max(chunks.values())
    scale, left = PLOT_W / float(simulated.makespan), 16 + 66
    pitch, top = high + 6 + ROW, first_lane(drawing) - (high - BLOCK) / 2
    bottom = top + schedule.num_ranks * pitch
    drawn = [b for b in drawn_works(drawing, scale, left, top) if b[0] < bottom]
    wanted = [
        (
            top + w.rank * pitch + LOWER * chunks[w.rank, w.stage],
            lighter(rank_color(w.rank), PALER[w.op])
            if w.op != "F"
            else rank_color(w.rank),
            w.start,
            w.end,
        )
        for w in works
    ]
    if len(drawn) != len(wanted):
        yield f"{len(drawn)} blocks instead of {len(wanted)}"
    for block, want in zip(sorted(drawn), sorted(wanted), strict=False):
        if block[1] != want[1] or block[::2] != pytest.approx(want[::2], abs=0.05):
            yield f"{block} instead of {want}"


@pytest.mark.parametrize("view", [v for v in VIEWS if v[1] > 1 and v[2] < 16], ids=str)
def test_every_action_is_drawn_when_it_happens(view):
    schedule = named(*view)
    simulated = simulate_schedule(schedule, equal_costs(schedule))
    drawing = schedule_view(*view)
    assert list(shown_faults(drawing, schedule, simulated)) == []
    said = " ".join(words(drawing))
    assert f"bubble {float(simulated.bubble):.1%}" in said


def test_a_wrong_picture_of_a_schedule_is_seen():
    right = named("1f1b", 4, 8)
    simulated = simulate_schedule(right)
    others = [named("gpipe", 4, 8), named("1f1b", 4, 7), named("zero_bubble", 4, 8)]
    for other in others:
        assert list(shown_faults(schedule_view(other), right, simulated))


def test_numbers_in_blocks_are_microbatches():
    said = words(schedule_view("zero_bubble", 3, 5))
    for op, k in itertools.product("FIW", range(5)):
        assert said.count(f"{op}{k}") == 3  # ranks
    said = words(schedule_view("interleaved", 4, 8, 2))  # no room for letters
    plain = [said.count(f"{k}") for k in (1, 2, 3, 4, 6, 7)]  # 0, 5: of the axis, too
    assert plain == [4 * 2 * 2] * 6  # ranks, stages, F and B


def test_ops_can_be_told_apart_without_colours():
    for rank in range(8):
        color = rank_color(rank)
        shades = [lighter(color, p) if p else color for p in sorted(PALER.values())]
        assert len(set(shades)) == 4
        for a, b in itertools.pairwise(shades[:2] + shades[3:]):
            assert rank == 7 or contrast(a, b) > 1.2, (rank, a, b)  # yellow is light
    assert "dasharray" in schedule_view("zero_bubble").svg()  # dots


BUBBLES = {  # of 4 ranks and 8 microbatches, F = I = W
    "naive": Fraction(3, 4),
    "gpipe": Fraction(3, 11),
    "1f1b": Fraction(3, 11),
    "interleaved": Fraction(3, 2) / (8 + Fraction(3, 2)),
    "zero_bubble": Fraction(1, 9),
}


PEAKS = {
    "naive": [1, 1, 1, 1],
    "gpipe": [8, 8, 8, 8],
    "1f1b": [4, 3, 2, 1],
    "interleaved": [5.5, 4.5, 3.5, 2.5],
}


@pytest.mark.parametrize("name", BUBBLES)
def test_a_lane_says_how_long_its_rank_waits_and_what_it_keeps(name):
    drawing = schedule_view(name)
    notes = [w for w in words(drawing) if "keeps" in w and w.startswith("waits ")]
    assert len(notes) == 4
    for rank, note in enumerate(notes):
        share, keeps = re.fullmatch(r"waits ([\d.]+)%, keeps ([\d.]+)", note).groups()
        assert float(share) == pytest.approx(100 * BUBBLES[name], abs=0.06)
        if name in PEAKS:
            assert float(keeps) == PEAKS[name][rank]
        else:
            assert float(keeps) <= 4


def test_the_reader_may_draw_a_schedule_of_their_own():
    mine = parse("mine", ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    drawing = schedule_view(mine)
    assert drawing.title == "mine: 2 ranks, 2 microbatches"
    assert "bubble 33.3%" in " ".join(words(drawing))
    assert "rank 1: waits 1F0 1B0 1F1 1B1 waits (waits" in drawing.description
    stuck = parse("stuck", ["0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"])
    assert "bubble" in schedule_view(stuck).description  # odd, but it comes to an end
    with pytest.raises(ScheduleError, match="rank"):
        schedule_view(parse("stuck", ["0B0 0F0", "1F0 1B0"]))


def test_recorded_and_simulated_lie_on_one_axis():
    runs = {name: RUNS[name] for name in ("simulated", "measured")}
    drawing = pipeline_timeline(runs, unit=0.03)
    blocks = [b for b in drawn_works(drawing, 1, 82, 44) if b[1] not in LEGEND]
    assert len(blocks) == 2 * 4 * (8 + 8)
    half = len(blocks) // 2
    for one, other in zip(blocks[:half], blocks[half:], strict=True):
        assert one[1:] == pytest.approx(other[1:], abs=0.05)
    said = [w for w in words(drawing) if "ms, " in w]
    assert said == [f"{name}: 990 ms, 27.3% of it waiting" for name in runs]


def test_a_share_of_waiting_is_that_of_the_runtime():
    for name in ("gpipe", "zero_bubble"):
        events = list(recorded(name, 4, 8))
        works = works_of(events)
        wanted = float(BUBBLES[name])
        assert (
            idle_share(works) == pytest.approx(wanted) == pytest.approx(bubble(events))
        )
    late = [replace(w, start=w.start + 0.01, end=w.end + 0.01) if w.rank == 3 else w
            for w in works]  # fmt: skip
    assert idle_share(late) != pytest.approx(wanted)  # all others wait for it


def test_gaps_are_what_no_work_covers():
    works = [
        Work(0, "F", 0, 0, 1.0, 2.0),
        Work(0, "B", 0, 0, 1.5, 1.8),  # within the other
        Work(0, "F", 0, 1, 4.0, 5.0),
        Work(1, "F", 1, 0, 0.0, 6.0),
    ]
    assert gaps(works, 0) == [(0.0, 1.0), (2.0, 4.0), (5.0, 6.0)]
    assert gaps(works, 1) == []
    assert idle_share(works) == pytest.approx((4 / 6) / 2)
    assert idle_share(works, 0) == pytest.approx(4 / 6)


def test_who_works_tells_forward_from_backward_and_who_waits():
    drawing = who_works(one_after_the_other(2))
    said = words(drawing)
    assert said.count("forward") == said.count("backward") == 2
    assert said.count("waits 50.0%") == 2
    for rank in range(2):
        color = rank_color(rank)
        fill = {"forward": color, "backward": lighter(color, PALER["B"])}
        for word, want in fill.items():
            assert fills(drawing, word)[rank] == want
    assert "rank 1: waits forward backward waits (waits 50.0%)" in drawing.description


test_what_cannot_be_drawn = refused(
    (lambda: schedule_view("gpip"), "schedule is 'gpip'; it can be 'naive'"),
    (lambda: schedule_view(ranks=0), "ranks is 0"),
    (lambda: schedule_view(ranks=9), "ranks is 9"),
    (lambda: schedule_view(microbatches=17), "microbatches is 17"),
    (lambda: schedule_view("interleaved", stages_per_rank=5), "stages_per_rank is"),
    (lambda: pipeline_timeline({}), "no runs"),
    (lambda: pipeline_timeline([]), "nothing was computed"),
    (lambda: pipeline_timeline(RUNS, unit=0), "unit is 0"),
    (lambda: who_works([Event(0, "wait", 0, 1, lane="wait")]), "nothing was"),
)


def test_sliders_and_galleries():
    controls = {"ranks": (1, 8), "microbatches": (1, 16), "stages_per_rank": (1, 4)}
    settings = [{"schedule": s} for s in ("gpipe", "1f1b")]
    check_sliders(schedule_view, settings, schedule=list(SCHEDULES), **controls)
