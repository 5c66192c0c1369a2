"""A toy of CUDA's caching allocator: best fit, split and merge. Chapter 06.

It follows `c10/cuda/CUDACachingAllocator.cpp` of PyTorch (commit 001074d2, 2025) for
one stream and default settings, with the numbers of PyTorch 2.13
(`c10/core/AllocatorConfig.h`):

    rounding   a block has a multiple of 512 bytes (`round_size`)
    pools      requests of up to 1 MiB, and larger ones, have separate segments
               (`get_pool`)
    segments   the driver is asked for 2 MiB for a small request, 20 MiB for a larger
               one below 10 MiB, else the request rounded up to a multiple of 2 MiB
               (`get_allocation_size`)
    best fit   a request gets the smallest free block in which it fits
               (`get_free_block`)
    split      the rest of the block stays free if it has at least 512 bytes in the
               small pool, or more than 1 MiB in the large one (`should_split`)
    merge      a freed block merges with free neighbours in its segment
               (`try_merge_blocks`)
    no memory  segments that are wholly free return to the driver, which is asked once
               more (`release_cached_blocks`)

`ExpandableAllocator` follows `expandable_segments:True` (the same file's note
"Expandable Segments"): one segment for each pool, which grows at its end by pages of 2
and 20 MiB. Its last block, which can grow, is taken only if no other block fits. Unlike
PyTorch's it never returns free pages.

Of two free blocks with the same size this toy takes the one in the older segment,
PyTorch the one with the lower address. Not modelled: other streams,
`max_split_size_mb`, CUDA graphs, time.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MIB = 2**20
ROUND, SMALL = 512, MIB  # bytes: requests are rounded up to ROUND; up to SMALL is small
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
LARGE, STEP = 10 * MIB, 2 * MIB  # from LARGE on, a segment is a multiple of STEP


@dataclass(eq=False)
class Block:
    """A range of a segment; `storage`: the id of the storage in it, None if free."""

    nbytes: int
    storage: int | None = None


@dataclass(eq=False)
class Segment:
    """Memory from the driver, divided into blocks without gaps.

    `small` says whether the segment serves small requests.
    """

    small: bool
    blocks: list[Block]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)


class OutOfMemoryError(MemoryError):
    """An error: the driver has no memory left for a request."""


class CachingAllocator:
    """An allocator that keeps freed memory for later requests.

    Args:
        capacity: bytes that the driver has; None means no limit.

    Attributes:
        segments: the memory that was taken from the driver, the oldest first.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.segments: list[Segment] = []

    def malloc(self, storage: int, nbytes: int) -> None:
        """Assign a block to a storage, and split off the rest of the block.

        Raises OutOfMemoryError if there is no room.
        """
        size = rounded(nbytes, ROUND)
        segment, block = self._best_fit(size) or self._new_block(size)
        rest = block.nbytes - size
        if self._splits(segment, rest):
            block.nbytes = size
            segment.blocks.insert(segment.blocks.index(block) + 1, Block(rest))
        block.storage = storage

    def free(self, storage: int) -> None:
        """Mark the block of a storage as free, and merge it with free neighbours."""
        for segment in self.segments:
            for at, block in enumerate(segment.blocks):
                if block.storage == storage:
                    block.storage = None
                    merge(segment.blocks, at)
                    merge(segment.blocks, at - 1)
                    return

    def _best_fit(self, size: int) -> tuple[Segment, Block] | None:
        fitting = self._fitting(size)
        return min(fitting, key=lambda pair: pair[1].nbytes, default=None)

    def _fitting(self, size: int) -> list[tuple[Segment, Block]]:
        return [
            (segment, block)
            for segment in self.segments
            for block in segment.blocks
            if segment.small == (size <= SMALL)
            and block.storage is None
            and block.nbytes >= size
        ]

    def _splits(self, segment: Segment, rest: int) -> bool:
        return rest >= ROUND if segment.small else rest > SMALL

    def _new_block(self, size: int) -> tuple[Segment, Block]:
        small = size <= SMALL
        nbytes = SMALL_SEGMENT if small else LARGE_SEGMENT
        nbytes = rounded(size, STEP) if size >= LARGE else nbytes
        if self._exceeded(nbytes):  # return wholly free segments to the driver
            used = [
                s for s in self.segments if len(s.blocks) > 1 or s.blocks[0].storage
            ]
            self.segments = used
        if self._exceeded(nbytes):
            raise OutOfMemoryError(self._explained(size))
        self.segments.append(Segment(small, [Block(nbytes)]))
        return self.segments[-1], self.segments[-1].blocks[0]

    # ---- numbers ---------------------------------------------------------------------

    def _exceeded(self, more: int) -> bool:
        return self.capacity is not None and self.reserved + more > self.capacity

    def _explained(self, size: int) -> str:
        mib = [n / MIB for n in (size, self.allocated, sum(self.holes), self.largest)]
        return (
            "tried to allocate {:.2f} MiB. {:.2f} MiB are allocated, and {:.2f} MiB "
            "are reserved but unallocated, at most {:.2f} MiB of them in one block"
        ).format(*mib)

    @property
    def reserved(self) -> int:
        """Bytes that were taken from the driver."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def holes(self) -> list[int]:
        """The sizes of all free blocks, in bytes."""
        blocks = [b for segment in self.segments for b in segment.blocks]
        return [b.nbytes for b in blocks if b.storage is None]

    @property
    def allocated(self) -> int:
        """Bytes of all blocks in use."""
        return self.reserved - sum(self.holes)

    @property
    def largest(self) -> int:
        """Bytes of the largest free block."""
        return max(self.holes, default=0)


class ExpandableAllocator(CachingAllocator):
    """A CachingAllocator with one segment for each pool, which grows at its end."""

    def _best_fit(self, size: int) -> tuple[Segment, Block] | None:
        def growth_last(pair: tuple[Segment, Block]) -> tuple[bool, int]:
            segment, block = pair
            return block is segment.blocks[-1], block.nbytes

        return min(self._fitting(size), key=growth_last, default=None)

    def _splits(self, segment: Segment, rest: int) -> bool:
        return rest >= ROUND

    def _new_block(self, size: int) -> tuple[Segment, Block]:
        small = size <= SMALL
        found = [segment for segment in self.segments if segment.small == small]
        segment = found[0] if found else Segment(small, [Block(0)])
        last = segment.blocks[-1] if segment.blocks[-1].storage is None else Block(0)
        more = rounded(size - last.nbytes, SMALL_SEGMENT if small else LARGE_SEGMENT)
        if self._exceeded(more):
            raise OutOfMemoryError(self._explained(size))
        if not found:
            self.segments.append(segment)
        if last is not segment.blocks[-1]:
            segment.blocks.append(last)
        last.nbytes += more
        return segment, last


def merge(blocks: list[Block], at: int) -> None:
    """Merge the block at a position with the next one, if both are free."""
    pair = blocks[at : at + 2] if at >= 0 else []
    if len(pair) == 2 and all(block.storage is None for block in pair):
        blocks[at : at + 2] = [Block(sum(block.nbytes for block in pair))]


def rounded(nbytes: int, unit: int) -> int:
    """Round up to a multiple of `unit`, at least one."""
    return max(1, -(-nbytes // unit)) * unit


def play(requests: Iterable[tuple[int, int]], allocator: CachingAllocator) -> list[int]:
    """Let an allocator serve `MemoryLog.requests`; return the reserved bytes over time.

    A storage that is resized is freed and allocated anew. Raises OutOfMemoryError at
    the first request that the allocator cannot serve.
    """
    reserved, living = [], set[int]()
    for storage, nbytes in requests:
        if storage in living:
            allocator.free(storage)
            living.remove(storage)
        if nbytes:
            allocator.malloc(storage, nbytes)
            living.add(storage)
        reserved.append(allocator.reserved)
    return reserved
