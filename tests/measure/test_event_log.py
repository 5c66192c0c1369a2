"""Events: the log, time that overlaps, and one clock for all ranks."""

from __future__ import annotations

import math
import pickle
import sys
import threading
import time
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ddp_course.launch import spawn
from ddp_course.measure import (
    Event,
    EventLog,
    active_logs,
    busy,
    overlap,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="CLOCK_MONOTONIC is Linux's")

# ---- the log -----------------------------------------------------------------------


def test_logs_collect_what_happens_in_their_block():
    with EventLog(rank=3) as outer:
        with EventLog(rank=3) as inner:
            for log in active_logs():
                log.add("send", 2.0, 3.0, 8, lane="communication", to=1)
        for log in active_logs():
            log.add("compute", 1.0, 2.5)
    assert active_logs() == ()
    sent = Event(3, "send", 2.0, 3.0, 8, "communication", {"to": 1})
    assert inner.events == [sent]
    assert outer.events == [Event(3, "compute", 1.0, 2.5, 0, "compute"), sent]
    assert pickle.loads(pickle.dumps(outer)).events == outer.events
    outer.events.append("nonsense")  # they are the log's own
    assert "nonsense" not in outer.events


def test_a_span_lasts_as_long_as_its_block_even_if_that_raises():
    log = EventLog()
    before = time.perf_counter()
    with log.span("compute", layer=2):
        time.sleep(0.01)
    with pytest.raises(ZeroDivisionError), log.span("fails", nbytes=5, lane="x"):
        1 / 0  # noqa: B018
    after = time.perf_counter()
    first, second = log.events
    assert first.op == first.lane == "compute"
    assert first.detail == {"layer": 2}
    assert before <= first.start <= first.end - 0.01 < second.start
    assert second.end <= after
    assert (second.op, second.nbytes, second.lane) == ("fails", 5, "x")


def test_many_threads_may_add_but_no_event_ends_before_it_starts():
    log = EventLog(0)
    work = lambda: [log.add("x", 0, 1) for _ in range(100)]  # noqa: E731
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.events) == 800
    for end in (0.999, -1, math.nan):
        with pytest.raises(ValueError, match="starts at 1"):
            Event(0, "x", 1, end)


# ---- overlap and busy: against counting tick by tick -------------------------------


@st.composite
def any_events(draw) -> list[Event]:
    events = []
    for _ in range(draw(st.integers(0, 8))):
        start = draw(st.integers(0, 12))
        rank, op = draw(st.integers(0, 1)), draw(st.sampled_from("abc"))
        lane = draw(st.sampled_from(["", "gpu", "net"]))
        events.append(Event(rank, op, start, start + draw(st.integers(0, 6)), 0, lane))
    return events


def ticks(events, what, rank) -> set[int]:
    return {
        tick
        for e in events
        if e.rank == rank and what in (e.op, e.lane, None)
        for tick in range(e.start, e.end)
    }


NAMES = st.sampled_from(["a", "b", "gpu", "net", "nobody"])


@given(any_events(), NAMES, NAMES)
def test_overlap_and_busy_count_each_moment_once(events, a, b):
    of_ranks = [[event for event in events if event.rank == r] for r in (0, 1)]
    each = [len(ticks(events, a, r) & ticks(events, b, r)) for r in (0, 1)]
    assert [overlap(own, a, b) for own in of_ranks] == each
    assert overlap(events, a, b) == overlap(events, b, a) == sum(each)
    assert overlap(events, a, a) == busy(events, a)
    for what in (a, None):
        each = [len(ticks(events, what, r)) for r in (0, 1)]
        assert [busy(own, what) for own in of_ranks] == each
        assert busy(events, what) == sum(each)


def test_overlap_of_exact_times_is_exact():
    third = Fraction(1, 3)
    events = [Event(0, "a", 0 * third, third), Event(0, "b", third / 2, 1)]
    assert overlap(events, "a", "b") == Fraction(1, 6)


# ---- one clock for all ranks -------------------------------------------------------


def ping_pong(rounds: int = 50) -> list[list[Event]]:
    """Return for each round: when this rank's part of it began and ended."""
    rank, ball = dist.get_rank(), torch.zeros(1)
    with EventLog() as log:
        for _ in range(rounds):
            with log.span("round"):
                if rank == 0:
                    dist.send(ball, 1)
                    dist.recv(ball, 1)
                else:
                    dist.recv(ball, 0)
                    start = time.perf_counter()
                    log.add("has the ball", start, time.perf_counter())
                    dist.send(ball, 0)
    return log.events


def in_order(rounds: list[Event], balls: list[Event], shift: float = 0.0) -> bool:
    """Tell whether rank 1 had the ball while rank 0 was without, by both clocks."""
    return all(
        mine.start <= its.start + shift <= its.end + shift <= mine.end
        for mine, its in zip(rounds, balls, strict=True)
    )


@linux
def test_ranks_share_one_clock():
    of_0, of_1 = spawn(ping_pong, world_size=2)
    balls = [event for event in of_1 if event.op == "has the ball"]
    assert {event.rank for event in of_0} == {0} != {event.rank for event in of_1}
    assert in_order(of_0, balls)
    longest = max(event.seconds for event in of_0)
    assert not in_order(of_0, balls, shift=longest)  # clocks that differ are seen
    assert not in_order(of_0, balls, shift=-longest)
