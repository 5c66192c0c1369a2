"""All schedules: their orders, bubbles and activations, against the formulas."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from schedules_torch import torch_schedule

from ddp_course import spec, theory
from ddp_course.pipeline import (
    SCHEDULES,
    Action,
    Costs,
    Schedule,
    check,
    gpipe,
    parse,
    simulate_schedule,
)

NAMES = list(SCHEDULES)
EVERY = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 5, 8, 11, 16)]


SEVERAL = {name for name, about in spec.SCHEDULES.items() if about.any_stages}


def named(name: str, p: int, m: int, v: int | None = None) -> Schedule:
    return SCHEDULES[name](p, m, *([v] if v and name in SEVERAL else []))


def stages_per_rank(name: str) -> tuple[int | None, ...]:
    return (1, 2, 3) if name in SEVERAL else (None,)


def default(name: str) -> int:
    """Return the stages on each rank, if none are given."""
    return spec.SCHEDULES[name].stages_per_rank


def each(v: int | None) -> Costs:
    """Each of v stages takes 1/v of what one would."""
    return Costs(*[Fraction(1, v or 1)] * 3)


# ---- what they are ------------------------------------------------------------------

ORDERS = {
    "naive": ["0F0 0B0 0F1 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"],
    "gpipe": ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"],
    "1f1b": ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"],
    "zero_bubble": [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ],
    "interleaved": [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ],
}


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_and_three_microbatches(name):
    assert name in ORDERS, f"ORDERS lacks {name}: its order for two ranks and three"
    schedule = SCHEDULES[name](2, 3)
    assert schedule == parse(name, ORDERS[name])
    rows = [line.partition(" | ")[2] for line in str(schedule).splitlines()[1:]]
    assert rows == ORDERS[name]


@pytest.mark.parametrize("name", NAMES)
def test_legal_for_every_number_of_ranks_and_microbatches(name):
    """Even with blocking sends; and nobody keeps more than the formula says."""
    for p, m in EVERY:
        for v in stages_per_rank(name):
            schedule = named(name, p, m, v)
            proof = check(schedule)
            ops = {action.op for row in schedule.ranks for action in row}
            assert spec.SCHEDULES[name].halves == ("I" in ops)
            assert schedule.num_stages == p * (v or default(name))
            placed = [schedule.stages_of(rank) for rank in range(p)]
            assert {len(stages) for stages in placed} == {v or default(name)}
            if name not in theory.PIPELINES:
                continue
            peaks = [theory.pipeline_activations(name, p, m, r, v) for r in range(p)]
            assert proof.peak_activations == tuple(peaks), (p, m, v)
            assert schedule.ranks_of_stages == (*range(p),) * (v or default(name))
            assert placed == [(*range(r, schedule.num_stages, p),) for r in range(p)]


@pytest.mark.parametrize("name", theory.PIPELINES)
def test_bubble_and_time_are_the_formulas(name):
    """Exactly, with fractions, on every rank alike."""
    for p, m in EVERY:
        for v in stages_per_rank(name):
            if name == "zero_bubble" and m < p and (v or 1) > 1:
                continue  # no formula
            each_has = v or default(name)
            found = simulate_schedule(named(name, p, m, v), each(each_has))
            assert found.makespan == theory.pipeline_time(name, p, m, v), (p, m, v)
            bubble = theory.pipeline_bubble(name, p, m, v)
            assert found.bubble == bubble
            assert set(found.idle) == {bubble}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(theory.PIPELINES),
    p=st.integers(1, 6),
    m=st.integers(1, 12),
    v=st.integers(1, 3),
    times=st.tuples(*[st.integers(1, 9)] * 3),
)
def test_with_any_times_of_forward_and_backward(name, p, m, v, times):
    v = v if name == "interleaved" or (name == "zero_bubble" and m >= p) else 1
    forward, inputs, weights = times
    found = simulate_schedule(
        named(name, p, m, v), Costs(*(Fraction(t, v) for t in times))
    )
    time = theory.pipeline_time(name, p, m, v, F=forward, I=inputs, W=weights)
    if name == "zero_bubble" and weights > min(forward, inputs):
        assert found.makespan >= time
    else:
        assert found.makespan == time


# ---- against PyTorch ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zero_bubble"])
def test_the_orders_are_those_of_pytorch(name):
    """Wherever PyTorch has one. Its 1F1B's printed last row is off by one."""
    compared = 0
    for p in range(1, 6):
        for m in range(1, 13):
            for v in stages_per_rank(name):
                try:
                    theirs = torch_schedule(name, p, m, v or default(name))
                except ValueError:  # such as 1F1B with fewer microbatches than stages
                    continue
                ours = named(name, p, m, v)
                if name == "1f1b":
                    assert ours.ranks[:-1] == theirs.ranks[:-1]
                    assert ours.ranks[-1] == _mended(theirs.ranks[-1])
                else:
                    assert ours.ranks == theirs.ranks, (p, m, v)
                compared += 1
    assert compared >= 40


def _mended(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """PyTorch 2.9 to 2.13 count the last rank's forwards from 1 in `pipeline_order`."""
    first = row[0].microbatch
    return tuple(
        Action(a.op, a.stage, a.microbatch - first if a.op == "F" else a.microbatch)
        for a in row
    )


# ---- what they are made of ----------------------------------------------------------


test_actions_and_schedules_say_what_is_wrong = refused(
    *(
        (partial(Action.parse, text), "is no action")
        for text in ("", "F0", "0F", "0X1", "0f1", "-1F0", "0F0 ", "0F1.5")
    ),
    (lambda: Action("X", 0, 0), "op is 'X'; it can be 'F', 'B', 'I', 'W'"),
    (lambda: Action("F", -1, 0), "stage is -1"),
    (lambda: Action("F", 0, 1.5), "microbatch is 1.5"),
    (lambda: Action("F", True, 0), "stage is True"),
    (lambda: Schedule("empty", 1, 1, ()), "num_ranks is 0"),
    (lambda: parse("empty", [""]), "num_stages is 0"),
    (lambda: gpipe(2, 2).rank_of(7), "stage 7 is on no rank"),
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", None])
def test_counts_are_checked(name, wrong):
    with pytest.raises(ValueError, match="num_ranks is"):
        SCHEDULES[name](wrong, 2)
    with pytest.raises(ValueError, match="num_microbatches is"):
        SCHEDULES[name](2, wrong)
    if name in SEVERAL:
        with pytest.raises(ValueError, match="stages_per_rank is"):
            SCHEDULES[name](2, 2, wrong)
