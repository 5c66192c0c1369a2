"""The toy allocator does what CUDA's is documented to do; planted faults are seen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from drawings import check_sliders, laid_out, rects, words
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from ddp_course.chapters.ch06_memory import caching_allocator as toy
from ddp_course.chapters.ch06_memory.caching_allocator import (
    MIB,
    CachingAllocator,
    ExpandableAllocator,
    OutOfMemoryError,
    play,
)
from ddp_course.chapters.ch06_memory.memory_map import memory_map

KIB = 1024


def sizes(allocator: CachingAllocator) -> list[list[tuple[int, bool]]]:
    """Return (bytes, whether it is used) of each block of each segment."""
    return [
        [(block.nbytes, block.storage is not None) for block in segment.blocks]
        for segment in allocator.segments
    ]


def served(make, *requests, **options) -> CachingAllocator:
    """Return an allocator that has served (storage, bytes) requests; 0 bytes: freed."""
    allocator = make(**options)
    play(requests, allocator)
    return allocator


# ---- what the source of PyTorch says, case by case -----------------------------------


def rounds_to_512(make):
    """`round_size`: "all sizes are rounded to at least 512 bytes"."""
    for nbytes, rounded in ((1, 512), (512, 512), (513, 1024)):
        assert served(make, (1, nbytes)).allocated == rounded


def small_requests_share_segments_of_2_mib(make):
    """kSmallBuffer: '"small" allocations are packed in 2 MiB blocks'."""
    allocator = served(make, (1, 512), (2, MIB), (3, MIB - 512))
    assert sizes(allocator) == [[(512, True), (MIB, True), (MIB - 512, True)]]


def middle_requests_share_segments_of_20_mib(make):
    """kMinLargeAlloc: "allocations between 1 and 10 MiB may use kLargeBuffer"."""
    allocator = served(make, (1, MIB + 512), (2, 9 * MIB))
    assert allocator.reserved == 20 * MIB
    assert [size for size, used in sizes(allocator)[0] if used] == [MIB + 512, 9 * MIB]


def large_requests_are_rounded_up_to_2_mib(make):
    """kRoundLarge: "round up large allocations to 2 MiB"."""
    allocator = served(make, (1, 10 * MIB), (2, 20 * MIB + 1))
    assert [s.nbytes for s in allocator.segments] == [10 * MIB, 22 * MIB]


def pools_do_not_mix(make):
    """`get_pool`: a small request never gets a hole of a large segment."""
    allocator = served(make, (1, 12 * MIB), (1, 0), (2, 512))
    assert [segment.small for segment in allocator.segments] == [False, True]


def a_large_rest_is_split_off(make):
    """`should_split`: in the large pool the rest must have more than 1 MiB."""
    for rest, blocks in ((MIB, 1), (MIB + 512, 2)):
        allocator = served(make, (1, 12 * MIB), (1, 0), (2, 12 * MIB - rest))
        assert len(allocator.segments) == 1
        assert len(allocator.segments[0].blocks) == blocks


def a_small_rest_is_split_off(make):
    """`should_split`: in the small pool 512 bytes suffice."""
    allocator = served(make, (1, MIB), (2, MIB), (1, 0), (3, MIB - 512))
    assert sizes(allocator) == [[(MIB - 512, True), (512, False), (MIB, True)]]


def the_smallest_block_that_fits_is_taken(make):
    """`get_free_block`: the first in an order by size that is large enough."""
    first = [(1, 16 * MIB), (2, 12 * MIB), (3, 14 * MIB), (1, 0), (2, 0), (3, 0)]
    allocator = served(make, *first, (4, 11 * MIB))
    used = [sum(n for n, used in s if used) for s in sizes(allocator)]
    assert used == [0, 12 * MIB, 0]  # a rest of 1 MiB is not split off


def free_neighbours_merge(make):
    """`try_merge_blocks`: with the previous and the next block of the segment."""
    filled = [(1, 5 * MIB), (2, 5 * MIB), (3, 5 * MIB), (4, 5 * MIB)]
    allocator = served(make, *filled, (1, 0), (3, 0))
    assert allocator.holes == [5 * MIB, 5 * MIB]
    allocator.free(2)
    assert sizes(allocator) == [[(15 * MIB, False), (5 * MIB, True)]]


def segments_do_not_merge(make):
    """`try_merge_blocks` follows the blocks that one segment was split into."""
    filled = [(k, 5 * MIB) for k in range(1, 9)]
    allocator = served(make, *filled, (4, 0), (5, 0))
    assert allocator.holes == [5 * MIB, 5 * MIB]
    allocator.malloc(9, 9 * MIB)
    assert allocator.reserved == 60 * MIB


def freed_memory_stays_reserved(make):
    """The cache: "reserved" does not shrink, and serves the next request."""
    allocator = served(make, (1, 12 * MIB), (1, 0))
    assert (allocator.allocated, allocator.reserved) == (0, 12 * MIB)
    allocator.malloc(2, 12 * MIB)
    assert allocator.reserved == 12 * MIB


def free_segments_return_before_memory_is_out(make):
    """`release_cached_blocks`: "Free all non-split cached blocks and retry"."""
    allocator = served(make, (1, 12 * MIB), (2, 512), (1, 0), capacity=20 * MIB)
    allocator.malloc(3, 18 * MIB)
    assert [segment.nbytes for segment in allocator.segments] == [2 * MIB, 18 * MIB]


def a_request_that_fits_in_no_hole_is_refused(make):
    """The message names what is reserved but unallocated; nothing has changed."""
    filled = [(k, 5 * MIB) for k in range(1, 5)]
    allocator = served(make, *filled, (1, 0), (3, 0), capacity=30 * MIB)
    before = sizes(allocator)
    with pytest.raises(OutOfMemoryError, match=r"6\.00 MiB.* 10\.00.*at most 5\.00"):
        allocator.malloc(9, 6 * MIB)
    assert sizes(allocator) == before


CASES = [
    rounds_to_512,
    small_requests_share_segments_of_2_mib,
    middle_requests_share_segments_of_20_mib,
    large_requests_are_rounded_up_to_2_mib,
    pools_do_not_mix,
    a_large_rest_is_split_off,
    a_small_rest_is_split_off,
    the_smallest_block_that_fits_is_taken,
    free_neighbours_merge,
    segments_do_not_merge,
    freed_memory_stays_reserved,
    free_segments_return_before_memory_is_out,
    a_request_that_fits_in_no_hole_is_refused,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_toy_does_as_documented(case):
    case(CachingAllocator)


def test_the_constants_are_those_of_the_installed_pytorch():
    header = Path(torch.__file__).parent / "include/c10/core/AllocatorConfig.h"
    if not header.exists():
        pytest.skip("this version of PyTorch has its constants elsewhere")
    text = header.read_text()
    names = "MinBlockSize", "SmallSize", "SmallBuffer", "MinLargeAlloc", "RoundLarge"
    found = [int(re.search(rf"k{name} = (\d+);", text)[1]) for name in names]
    found += [int(re.search(r"large_segment_size_\{(\d+)\}", text)[1])]
    ours = toy.ROUND, toy.SMALL, toy.SMALL_SEGMENT, toy.LARGE, toy.STEP
    assert found == [*ours, toy.LARGE_SEGMENT]


# ---- planted faults ------------------------------------------------------------------


class FirstFit(CachingAllocator):
    """Plant: the first block that fits."""

    def _best_fit(self, size):
        for segment in self.segments:
            for block in segment.blocks:
                free = block.storage is None and block.nbytes >= size
                if free and segment.small == (size <= MIB):
                    return segment, block
        return None


class WorstFit(CachingAllocator):
    """Plant: the largest block."""

    def _best_fit(self, size):
        fitting = [
            (segment, block)
            for segment in self.segments
            for block in segment.blocks
            if segment.small == (size <= MIB)
            if block.storage is None and block.nbytes >= size
        ]
        return max(fitting, key=lambda pair: pair[1].nbytes, default=None)


class OnePool(CachingAllocator):
    """Plant: any hole will do."""

    def _best_fit(self, size):
        blocks = [(s, b) for s in self.segments for b in s.blocks]
        fitting = [(s, b) for s, b in blocks if not b.storage and b.nbytes >= size]
        return min(fitting, key=lambda pair: pair[1].nbytes, default=None)


class SplitsAlways(CachingAllocator):
    """Plant: the large pool keeps small rests."""

    def _splits(self, segment, rest):
        return rest >= 512


class SplitsNever(CachingAllocator):
    """Plant: a request gets the whole block."""

    def _splits(self, segment, rest):
        return False


class NoMerge(CachingAllocator):
    """Plant: holes stay apart."""

    def free(self, storage):
        for segment in self.segments:
            for block in segment.blocks:
                if block.storage == storage:
                    block.storage = None


class MergesWithNextOnly(CachingAllocator):
    """Plant: the previous block is forgotten."""

    def free(self, storage):
        for segment in self.segments:
            for at, block in enumerate(segment.blocks):
                if block.storage == storage:
                    block.storage = None
                    toy.merge(segment.blocks, at)
                    return


class NoCache(CachingAllocator):
    """Plant: what is free goes back at once."""

    def free(self, storage):
        super().free(storage)
        self.segments = [s for s in self.segments if any(b.storage for b in s.blocks)]


class ExactSegments(CachingAllocator):
    """Plant: the driver is asked for each request alone."""

    def _new_block(self, size):
        self.segments.append(toy.Segment(size <= MIB, [toy.Block(size)]))
        return self.segments[-1], self.segments[-1].blocks[0]


class NeverReturns(CachingAllocator):
    """Plant: free segments are kept although memory is out."""

    def _new_block(self, size):
        if self._exceeded(size):
            raise OutOfMemoryError("planted")
        return super()._new_block(size)


PLANTS = {
    FirstFit: the_smallest_block_that_fits_is_taken,
    WorstFit: the_smallest_block_that_fits_is_taken,
    OnePool: pools_do_not_mix,
    SplitsAlways: a_large_rest_is_split_off,
    SplitsNever: middle_requests_share_segments_of_20_mib,
    NoMerge: free_neighbours_merge,
    MergesWithNextOnly: free_neighbours_merge,
    NoCache: freed_memory_stays_reserved,
    ExactSegments: small_requests_share_segments_of_2_mib,
    NeverReturns: free_segments_return_before_memory_is_out,
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_faults_are_seen(plant):
    with pytest.raises((AssertionError, AttributeError, OutOfMemoryError)):
        PLANTS[plant](plant)


# ---- any requests --------------------------------------------------------------------

REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 6), st.sampled_from([0, 0, 1, 700, MIB, 3 * MIB, 15 * MIB])
    ),
    max_size=60,
)


@given(REQUESTS)
@settings(max_examples=60, deadline=None)
def test_blocks_fill_their_segments_and_no_two_holes_touch(requests):
    for make in (CachingAllocator, ExpandableAllocator):
        allocator, wanted = make(), dict(requests)
        reserved = play(requests, allocator)
        assert reserved == sorted(reserved)  # a cache: nothing is given back
        blocks = [b for s in allocator.segments for b in s.blocks]
        assert {b.storage for b in blocks if b.storage} == {
            n for n in wanted if wanted[n]
        }
        for segment in allocator.segments:
            free = [block.storage is None for block in segment.blocks]
            assert (True, True) not in list(zip(free, free[1:], strict=False))
            page = 2 * MIB
            assert segment.nbytes % page == 0
            for block in segment.blocks:
                size = wanted.get(block.storage, block.nbytes)
                assert size <= block.nbytes <= size + MIB + 512
        assert allocator.allocated + sum(allocator.holes) == allocator.reserved


# ---- expandable segments -------------------------------------------------------------


def test_expandable_segments_grow_by_pages_and_serve_what_holes_cannot():
    filled = [(k, 5 * MIB) for k in range(1, 9)]
    holes = [(4, 0), (5, 0)]  # neighbours, but in segments of 20 MiB apart
    fixed = served(CachingAllocator, *filled, *holes, (9, 9 * MIB))
    grown = served(ExpandableAllocator, *filled, *holes, (9, 9 * MIB), (10, 512))
    assert fixed.reserved == 60 * MIB
    assert [s.nbytes for s in grown.segments] == [40 * MIB, 2 * MIB]
    grown = served(ExpandableAllocator, (1, 15 * MIB), (2, 12 * MIB))
    assert sizes(grown) == [[(15 * MIB, True), (12 * MIB, True), (13 * MIB, False)]]
    with pytest.raises(OutOfMemoryError, match="at most 13"):
        served(ExpandableAllocator, (1, 15 * MIB), (2, 12 * MIB), (3, 14 * MIB),
               capacity=50 * MIB)  # fmt: skip


def test_the_end_of_an_expandable_segment_is_kept_for_growth():
    """`get_free_block`: a block that can grow counts as large as it can become."""
    filled = [(1, 6 * MIB), (2, 10 * MIB), (1, 0)]  # a hole of 6, and the last 4 MiB
    grown = served(ExpandableAllocator, *filled, (3, 3 * MIB))
    assert [used for _, used in sizes(grown)[0]] == [True, False, True, False]
    fixed = served(CachingAllocator, *filled, (3, 3 * MIB))  # best fit alone: the end
    assert [used for _, used in sizes(fixed)[0]] == [False, True, True]


# ---- the map -------------------------------------------------------------------------

LOG = [(1, MIB), (2, 3 * MIB), (3, 700), (4, 30 * MIB), (2, 0), (5, 12 * MIB), (6, 600)]
test_the_layout = laid_out(
    lambda: memory_map(LOG),
    lambda: memory_map(LOG, 0),
    lambda: memory_map(LOG * 3, expandable=True),
    lambda: memory_map(LOG, capacity=40 * MIB),
)


def test_the_map_draws_each_byte_of_each_segment_once():
    for expandable in (False, True):
        drawing = memory_map(LOG, len(LOG), expandable)
        allocator = (ExpandableAllocator if expandable else CachingAllocator)()
        play(LOG, allocator)
        drawn = [
            wide for *_, wide, high, e in rects(drawing)
            if high == 24 and e.get("fill") == "#FFFFFF"
        ]  # fmt: skip
        assert sum(drawn) == pytest.approx(16 * allocator.reserved / MIB)
        thick = [w for *_, w, _, e in rects(drawing) if e.get("stroke-width") == "3"]
        assert sum(thick) == pytest.approx(16 * allocator.largest / MIB)
        free = f"{sum(allocator.holes) / MIB:.1f} free"
        assert any(free in text for text in words(drawing))


def test_the_map_says_that_memory_is_out():
    assert "out of memory" in memory_map(LOG, capacity=40 * MIB).title
    check_sliders(
        lambda moment=2, expandable=False: memory_map(LOG, moment, expandable),
        [{"moment": 2}, {"moment": 5, "expandable": True}],
        moment=(0, len(LOG)),
        expandable=[False, True],
    )


test_moments_that_are_not_there = refused(
    (lambda: memory_map(LOG, 8), "moment is 8; the log has 7 requests"),
    (lambda: memory_map(LOG, -1), "moment is -1"),
)
