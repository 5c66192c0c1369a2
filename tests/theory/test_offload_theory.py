"""The closed forms against a simulation that knows only lanes and dependencies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_course.theory import offloaded_step_time, zero_offload_step_time

times = st.integers(0, 9)
settings = st.tuples(st.integers(1, 6), times, times, times, times, times)


class Lane:
    """Jobs one after the other."""

    def __init__(self):
        self.free = 0

    def do(self, ready, seconds):
        self.free = max(self.free, ready) + seconds
        return self.free


def stage3(units, c, f, b, r, u, ahead):
    """Fetch, compute and store unit by unit; `ahead` units are launched before."""
    fetches, stores, now = Lane(), Lane(), 0
    for backward, seconds in ((False, f), (True, b)):
        arrived = {}

        def fetch(k, at, arrived=arrived):
            if k < units and k not in arrived:
                arrived[k] = fetches.do(at, c)

        root = fetches.do(now, r)
        for k in range(ahead):
            fetch(k, now)
        now = root
        for k in range(units):
            for near in range(k, k + ahead + 1):
                fetch(near, now)
            now = max(now, arrived[k]) + seconds
            if backward:
                stores.do(now, c)
    return stores.do(now, r) + u


def zero_offload(units, c, f, b, r, u):
    out, back, now = Lane(), Lane(), units * f
    for _ in range(units):
        now += b
        out.do(now, c)
    updated = out.do(now, r) + u
    for _ in range(units):
        back.do(updated, c)
    return back.do(updated, r)


@given(settings)
def test_stage_3_on_the_host(setting):
    units, c, f, b, r, u = setting
    for ahead in (0, 1):
        wanted = stage3(*setting, ahead)
        more = {"root_copy": r, "update": u, "prefetch": bool(ahead)}
        assert offloaded_step_time(units, c, f, b, **more) == wanted, ahead


@given(settings)
def test_zero_offload(setting):
    units, c, f, b, r, u = setting
    got = zero_offload_step_time(units, c, f, b, root_copy=r, update=u)
    assert got == pytest.approx(zero_offload(*setting))


def test_what_a_prefetch_hides():
    assert offloaded_step_time(4, 1, 2, 4, prefetch=False) == 4 * (2 + 2 + 4) + 1
    assert offloaded_step_time(4, 1, 2, 4) == 4 * (2 + 4) + 2 + 1
    assert zero_offload_step_time(4, 1, 2, 4) == 4 * (2 + 4) + 1 + 4
