"""The smallest allocator there is: what it serves, what it refuses, what is drawn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_course.chapters.ch06_memory.fragments import first_fit, fragments

CUT = [("a", 4), ("b", 4), ("c", 4), ("d", 4), ("a", 0), ("c", 0), ("e", 6)]


def test_half_is_free_and_six_are_refused():
    last = first_fit(CUT, 16)[-1]
    assert (last.free, last.largest, last.failed) == (8, 4, True)
    assert last.holes == ((0, 4), (8, 4))
    served = first_fit([*CUT[:5], ("b", 0), ("e", 6)], 16)[-1]
    assert (served.failed, served.blocks["e"]) == (False, (0, 6))


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 9)), max_size=30))
def test_blocks_never_overlap_and_nothing_gets_lost(wishes):
    requests, taken = [], {}
    for name, units in wishes:
        requests.append((name, 0 if taken.pop(name, 0) else units))
        if not requests[-1][1]:
            continue
        if not first_fit(requests, 16)[-1].failed:
            taken[name] = units
    for room in first_fit(requests, 16):
        lies_in = [
            u for start, n in room.blocks.values() for u in range(start, start + n)
        ]
        free = [u for start, n in room.holes for u in range(start, start + n)]
        assert sorted(lies_in + free) == list(range(16))


def test_what_cannot_be_meant_is_told():
    for requests in ([("a", 0)], [("a", 2), ("a", 3)], [("a", -1)]):
        with pytest.raises(ValueError, match="'a'"):
            first_fit(requests, 16)


def test_the_picture_says_what_the_rooms_say():
    text = fragments(CUT).svg()
    assert "refused: free 8, largest hole 4" in text
    assert text.count("allocate") >= 5
