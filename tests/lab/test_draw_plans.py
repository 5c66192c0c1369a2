"""What several chapters draw: plans."""

import itertools
import re
from fractions import Fraction

import pytest
from drawings import boxes, fills, laid_out, words
from refusals import refused

from ddp_course.collectives.catalog import PLANS
from ddp_course.collectives.plan import Transfer, make_plan, simulate
from ddp_course.lab import explore
from ddp_course.lab.draw.grid import Grid, labels, layout
from ddp_course.lab.draw.steps import (
    collective,
    in_buffers,
    plan_step,
    plan_steps,
    sent_so_far,
)
from ddp_course.lab.palette import rank_color

RING = PLANS["all_reduce, ring"](4)
PIPELINE = make_plan(  # a broadcast of 64 chunks that follow each other down a line
    "pipeline",
    8,
    64,
    [Transfer(c + r, r, r + 1, c, c + 1, False) for c in range(64) for r in range(7)],
    start=[range(64), *[()] * 7],
)
SUM = make_plan("sum", 8, 64, [Transfer(0, r, 0, 0, 64, True) for r in range(1, 8)])
TWICE = make_plan("twice", 2, 2, [Transfer(s, 0, 1, 0, 2, True) for s in range(2)])
SPARSE = make_plan(
    "sparse", 2, 9, [Transfer(0, 0, 1, 3, 4, False)], [{3}, ()], [{3}] * 2
)


test_the_layout = laid_out(
    (collective, itertools.product(PLANS, (1, 2, 5, 8), (0, 2, 99))),
    (plan_steps, [make(4) for make in PLANS.values()]),
    (plan_step, [(PIPELINE, 40), (SUM, 1), (TWICE, 2), (SPARSE, 1)]),
)


def cells(drawing, plan):
    """Find, for each rank and chunk, the numbers that are drawn in its cell."""
    grid = layout(plan)
    texts, _, _ = boxes(drawing)
    rows = sorted(
        (box[1], text) for text, _, box in texts if re.fullmatch(r"rank \d", text)
    )
    assert [text for _, text in rows] == [f"rank {r}" for r in range(plan.world_size)]
    # Where the grid stands in the drawing: its first heading tells.
    (left,) = {
        box[0] + (box[2] - box[0]) / 2
        for t, s, box in texts
        if (t, s) == ("0", 11) and box[3] < 85 and box[1] > 70
    }
    left -= grid.x[0] + grid.look.width / 2
    found = {}
    for rank in range(plan.world_size):
        for chunk, x in enumerate(grid.x):
            low, high = left + x, left + x + grid.look.width
            top = 66 + grid.top(rank)
            inside = [
                int(text)
                for text, _, box in texts
                if low <= box[0] and box[2] <= high and top <= box[1]
                and box[3] <= top + grid.look.height
            ]  # fmt: skip
            found[rank, chunk] = tuple(sorted(inside))
    return found


@pytest.mark.parametrize(
    "name", ["all_reduce, ring", "all_reduce, halving-doubling", "scatter", "gather"]
)
@pytest.mark.parametrize("n", [2, 4])
def test_every_step_shows_what_simulate_says(name, n):
    plan = PLANS[name](n)
    for step, state in enumerate(simulate(plan)):
        shown = cells(plan_step(plan, step), plan)
        for rank in range(n):
            for chunk in range(plan.chunks):
                assert shown[rank, chunk] == state[rank][chunk]


def test_numbers_are_in_their_ranks_colour():
    for step in range(1, RING.steps + 1):
        d = plan_step(RING, step)
        for rank in range(4):
            assert fills(d, f"rank {rank}") == [rank_color(rank)]
            in_cells = fills(d, f"{rank}")[1:]  # the first one heads a column
            assert set(in_cells) == {rank_color(rank)}


def test_numbers_that_are_added_twice_are_told():
    assert words(plan_step(TWICE, 2)).count("0×2") == 2


def bold_frames(d):
    return d.svg().count('stroke-width="2.5"')


def test_only_complete_sums_are_framed():
    legend = 1
    frames = [bold_frames(plan_step(RING, step)) - legend for step in range(7)]
    assert frames == [0, 0, 0, 4, 8, 12, 16]
    assert bold_frames(plan_step(PLANS["all_gather, ring"](4), 3)) == 0
    assert bold_frames(plan_step(TWICE, 1)) - legend == 2
    assert bold_frames(plan_step(TWICE, 2)) - legend == 0  # too much


@pytest.mark.parametrize("name", PLANS)
def test_an_arrow_and_two_hatched_frames_for_each_transfer(name):
    for n in (2, 4, 7):
        plan = PLANS[name](n)
        for step in range(plan.steps + 1):
            d = plan_step(plan, step)
            moved = [t for t in plan.transfers if t.step == step - 1]
            assert d.svg().count("<polygon") == len(moved)
            legend = 1
            assert d.svg().count("<path") - legend == 2 * len(moved)


def arrow_tips(d):
    """Return the tip of each arrow."""
    tips = []
    for match in re.findall(r'<polygon points="(\S+),(\S+) ', d.svg()):
        tips.append(tuple(map(float, match)))
    return tips


def test_arrows_end_at_the_receiver():
    for name in (
        "all_reduce, ring",
        "all_reduce, tree",
        "all_reduce, halving-doubling",
    ):
        plan = PLANS[name](4)
        grid = layout(plan)
        for step in range(1, plan.steps + 1):
            want = sorted(t.dst for t in plan.transfers if t.step == step - 1)
            rows = sorted(
                rank
                for _, y in arrow_tips(plan_step(plan, step))
                for rank in range(4)
                if grid.top(rank) - 5 <= y <= grid.top(rank) + grid.look.height + 5
            )
            assert rows == want


def test_lines_beside_each_other_do_not_cover_each_other():
    for n in (4, 8):
        for name in PLANS:
            grid = layout(PLANS[name](n))
            for lanes in grid.lanes if isinstance(grid, Grid) else ():
                for p, lane in lanes.items():
                    for q, other in lanes.items():
                        assert p is q or lane != other or not p.meets(q)


def test_bytes_so_far():
    assert sent_so_far(RING, 6) == [Fraction(3, 2)] * 4
    assert sent_so_far(PLANS["scatter"](4), 3) == [Fraction(3, 4), 0, 0, 0]
    assert sent_so_far(PLANS["all_to_all"](4), 3) == [Fraction(3, 4)] * 4
    assert sent_so_far(PLANS["broadcast, tree"](4), 1) == [1, 0, 0, 0]
    assert words(plan_step(RING, 3)).count("3/4 S") == 4
    assert [in_buffers(Fraction(a)) for a in (0, 1, 3)] == ["0", "S", "3 S"]


def test_all_to_all_shows_only_what_is_relevant():
    plan = PLANS["all_to_all"](4)
    assert labels(plan)[:6] == ["0→0", "0→1", "0→2", "0→3", "1→0", "1→1"]
    for step in range(4):
        said = words(plan_step(plan, step))
        for i in range(4):
            for j in range(4):
                arrived = (j - i) % 4 <= step
                assert said.count(f"{i}→{j}") == 1 + arrived
                assert set(fills(plan_step(plan, step), f"{i}→{j}")) == {rank_color(i)}


def test_chunks_that_nobody_has_are_hidden():
    assert layout(SPARSE).chunks == [3]
    assert len(layout(PIPELINE).chunks) == 64
    assert layout(PIPELINE).lines > 1


def test_a_step_beyond_the_last_shows_the_last_and_says_so():
    said = words(collective("all_reduce, tree", 4, 9))
    assert "there is no step 9: step 4 is the last" in said
    assert "after 4 of 4 steps" in said
    last = words(collective("all_reduce, tree", 4, 4))
    assert [w for w in said if "no step" not in w] == [
        w for w in last if "message" not in w
    ]


def test_a_picture_keeps_its_size_while_a_slider_moves():
    sizes = {
        (d.width, d.height)
        for d in (collective("all_reduce, ring", 5, s) for s in range(12))
    }
    assert len(sizes) == 1


def test_explore_moves_through_all_settings():
    view = explore(collective, name=list(PLANS), world_size=(1, 8), step=(0, 14))
    name, size, step, picture = view.children
    assert (name.value, size.value, step.value) == ("all_reduce, ring", 4, 1)
    for value in PLANS:
        name.value = value
        for n in (1, 8):
            size.value = n
            step.value = 14
            assert picture.value.startswith("<img "), picture.value


def test_plan_steps_has_a_panel_for_each_state():
    said = words(plan_steps(RING))
    after = [w for w in said if w.startswith(("at the", "after"))]
    assert after == ["at the start", "after 1 step"] + [
        f"after {k} steps" for k in range(2, 7)
    ]


test_what_cannot_be_drawn = refused(
    (lambda: plan_step(RING, True), "step is True"),
    (lambda: collective("ring"), "name is 'ring'; .* 'all_reduce, ring'"),
    (lambda: collective(world_size=9), "world_size is 9; .* number, 1 to 8"),
    (lambda: collective(world_size=0), "world_size is 0; .* number, 1 to 8"),
    (lambda: collective(step=-1), "step is -1; .* number, 0 or more"),
    (lambda: collective(step="1"), "step is '1'; .* number, 0 or more"),
    (lambda: plan_steps(make_plan("big", 9, 1, [])), "big has 9 ranks .* up to 8"),
    (lambda: plan_step(make_plan("fine", 2, 65, []), 0), "65 chunks; .* 64 chunks"),
)
