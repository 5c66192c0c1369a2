"""Virtual time: what happens when, and what is read from it."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from refusals import refused

from ddp_course.pipeline import (
    SCHEDULES,
    Costs,
    ScheduleError,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    parse,
    simulate_schedule,
    zero_bubble,
)

# ---- what happens when --------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_does_one_thing_at_a_time_and_nothing_too_early(name):
    costs = Costs(F=2, I=[3, 1, 2, 4, 1, 2], W=1, send=Fraction(1, 2))
    for p, m in [(1, 3), (2, 3), (3, 5)]:
        schedule = SCHEDULES[name](p, m)
        found = simulate_schedule(schedule, costs)
        ends, starts = {}, [event.start for event in found.events]
        assert starts == sorted(starts)
        for event in found.events:
            ends[event.action] = event.end
            assert event.end - event.start == costs.of(event.action)
            for need in schedule.needs(event.action):
                away = schedule.rank_of(need.stage) != event.rank
                assert event.start >= ends[need] + (costs.send if away else 0)
        for rank, row in enumerate(schedule.ranks):
            own = [event for event in found.events if event.rank == rank]
            assert tuple(event.action for event in own) == row
            assert all(a.end <= b.start for a, b in zip(own, own[1:], strict=False))
            assert found.busy[rank] == sum(map(costs.of, row))


def test_messages_take_their_time():
    """Naive: all p-1 hops, there and back, for every microbatch."""
    found = simulate_schedule(naive(3, 4), Costs(1, 2, 3, send=10))
    assert found.makespan == 4 * (3 * (1 + 2 + 3) + 2 * 2 * 10)


def test_messages_in_gpipe_delay_only_filling_and_draining():
    p, m, send = 4, 8, Fraction(1, 4)
    costs = Costs(send=send)
    assert (
        simulate_schedule(gpipe(p, m), costs).makespan
        == (m + p - 1) * 3 + 2 * (p - 1) * send
    )


def test_one_slow_stage_sets_the_pace():
    """The other ranks wait at least as long as the slow one works more."""
    slow = simulate_schedule(
        one_f_one_b(4, 16), Costs(F=[1, 2, 1, 1], I=[1, 2, 1, 1], W=1)
    )
    even = simulate_schedule(one_f_one_b(4, 16))
    assert slow.makespan >= 16 * 5
    assert slow.idle[1] < even.idle[1] < slow.idle[0]


def test_idle_and_bubble():
    """Two ranks, of which one does three times the other's work."""
    found = simulate_schedule(naive(2, 1), Costs(F=[1, 3], I=[1, 3], W=[1, 3]))
    assert found.makespan == 12
    assert found.busy == (3, 9)
    assert found.idle == (Fraction(3, 4), Fraction(1, 4))
    assert found.bubble == Fraction(1, 2)


def test_floats_stay_floats_and_fractions_fractions():
    found = simulate_schedule(gpipe(2, 3), Costs(0.5, 0.25, 0.25))
    assert isinstance(found.bubble, float) and math.isclose(found.bubble, 0.25)
    found = simulate_schedule(
        gpipe(2, 3), Costs(Fraction(1, 2), Fraction(1, 4), Fraction(1, 4))
    )
    assert isinstance(found.bubble, Fraction) and found.bubble == Fraction(1, 4)


# ---- errors -------------------------------------------------------------------------


def test_a_schedule_that_comes_to_no_end():
    stuck = parse("stuck", ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    with pytest.raises(ScheduleError, match="ranks wait for each other: rank 0"):
        simulate_schedule(stuck)
    half = parse("half", ["0F0 0B0", "1F0"])
    with pytest.raises(ScheduleError, match="0B0, which needs 1B0, which no rank runs"):
        simulate_schedule(half)


test_costs_say_what_is_wrong = refused(
    (lambda: Costs(F=-1), "F is -1"),
    (lambda: Costs(I=[1, math.inf]), "I is inf"),
    (lambda: Costs(W="1"), "W is '1'"),
    (lambda: Costs(send=math.nan), "send is nan"),
    (lambda: Costs(F=0, I=0, W=0), "F, I and W are all 0"),
    (
        lambda: simulate_schedule(gpipe(3, 2), Costs(F=[1, 2])),
        "F has 2 costs, and there is a stage 2; it must have one for each",
    ),
)


# ---- as it is printed ---------------------------------------------------------------


def test_charts():
    assert str(simulate_schedule(gpipe(2, 3))).splitlines() == [
        "gpipe: 2 stages on 2 ranks, 3 microbatches; 1/4 of the time idle",
        "rank 0 | 0F0 0F1 0F2             0B0 ... 0B1 ... 0B2 ...",
        "rank 1 |     1F0 1F1 1F2 1B0 ... 1B1 ... 1B2 ...",
    ]
    thirds = Costs(*[Fraction(1, 3)] * 3)
    rows = str(simulate_schedule(zero_bubble(2, 2), thirds)).splitlines()[1:]
    assert rows == [
        "rank 0 | 0F0 0F1     0I0 0W0 0I1 0W1",
        "rank 1 |     1F0 1I0 1F1 1I1 1W0 1W1",
    ]


def test_times_that_are_no_columns_are_written_as_numbers():
    text = str(simulate_schedule(naive(1, 1), Costs(0.5, 0.25, 0.5)))
    assert text.splitlines()[1] == "rank 0 | 0F0 0-0.5 0B0 0.5-1.25"
    long = Costs(
        F=Fraction(2000, 2), I=Fraction(1), W=0
    )  # would be columns by the thousand
    assert str(simulate_schedule(naive(1, 1), long)).splitlines()[1] == (
        "rank 0 | 0F0 0-1000 0B0 1000-1001"
    )
    free = str(simulate_schedule(interleaved(1, 1), Costs(F=1, I=0, W=0)))
    assert free.splitlines()[1] == "rank 0 | 0F0 1F0 1B0 0B0"
