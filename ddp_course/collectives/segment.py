"""Memory that the ranks of one machine share, and how they wait for each other in it.

On one machine a message need not be sent: both ranks can look at the same memory. Read
in this order:

    mapping   one mapping of the same memory in every rank
    segment   such a mapping, with semaphores in it: `Segment.barrier`
    meeting   a barrier at which each rank shows what it came for

All that the ranks do in a segment obeys one rule, of two pages that take turns:

    What is written before barrier number c is written on page c % 2, each rank in
    places of its own. It is read after that barrier and before the next.

So whoever reads has passed the barrier at which the writer was done; and a page is
written again only behind one more barrier, at which all have arrived that read it. No
place is ever written and read at once. Explained in chapter 03.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from ddp_course.collectives.mapping import (
    LINE,
    PAGE,
    Exchange,
    round_up,
    shared_memory,
)

SPINS = 2000  # looks at a semaphore before going to sleep: about 1 ms
SLICE = 0.5  # seconds asleep before looking up for a deadline, or for Ctrl-C


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _sleep_at(semaphore: ctypes.c_void_p, seconds: float) -> bool:
    """Sleep until the semaphore is posted, and take it; False if that was too long."""
    libc = _libc()
    # A clock that somebody may set is only for C libraries that know no other.
    steady = hasattr(libc, "sem_clockwait")
    clock = time.CLOCK_MONOTONIC if steady else time.CLOCK_REALTIME
    until = time.clock_gettime_ns(clock) + int(seconds * 1e9)
    until = ctypes.byref(_Time(*divmod(until, 10**9)))
    if steady:
        return libc.sem_clockwait(semaphore, clock, until) == 0
    return libc.sem_timedwait(semaphore, until) == 0


class Segment:
    """Shared memory of a few ranks, and a barrier in it.

    `bytes` is the memory, a uint8 tensor, the same bytes on all ranks; `count` is the
    number of barriers so far, on all ranks alike, and `turn`, 0 or 1, the page that may
    be written now. Made by `share`.

    The barrier is a dissemination barrier: in round k, each rank tells the one 2**k
    places further that it has arrived (with all whom it heard of), and waits for the
    one 2**k places behind; after ceil(log2(size)) rounds each has heard of all. It
    "tells" by a POSIX semaphore in the shared memory. Those, unlike plain flags, put
    reads and writes in order on every CPU, and a rank can sleep at one.

    Source: Hensgen, Finkel, Manber 1988, "Two algorithms for barrier synchronization".
    Chapter 03.
    """

    def __init__(self, memory: Tensor, rank: int, size: int, timeout: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.count = 0
        self.bytes = memory[_head(size) :]
        self._memory = memory  # the semaphores' addresses are valid as long as this is
        self._broken: str | None = None
        # Called with those who are late, again and again, and with None when all came.
        self.watch: Callable[[list[int] | None], None] | None = None
        # Two numbers of each rank: how many barriers it came to; whether it has left.
        told = memory[: LINE * size].view(torch.int64).numpy()
        self._arrived = memoryview(told[:: LINE // 8])
        self._left = memoryview(told[1 :: LINE // 8])
        self._post, self._try = _libc().sem_post, _libc().sem_trywait
        self._rounds = [
            (self._semaphore((rank + 2**k) % size, k), self._semaphore(rank, k))
            for k in range(_rounds(size))
        ]

    def _semaphore(self, rank: int, k: int) -> ctypes.c_void_p:
        """Return the address of the semaphore at which `rank` waits in round k."""
        cell = self.size * (1 + k) + rank
        return ctypes.c_void_p(self._memory.data_ptr() + LINE * cell)

    @property
    def turn(self) -> int:
        """The page, 0 or 1, that may be written until the next barrier."""
        return self.count & 1

    def view(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the memory from byte `offset` on as a tensor."""
        nbytes = math.prod(shape) * dtype.itemsize
        if not 0 <= offset <= self.bytes.numel() - nbytes:
            raise ValueError(
                f"{nbytes} bytes from {offset} on do not lie within "
                f"{self.bytes.numel()}"
            )
        return self.bytes[offset : offset + nbytes].view(dtype).view(*shape)

    def barrier(self) -> None:
        """Wait until all ranks are here.

        Raises:
            TimeoutError: some did not arrive within `timeout` seconds; names them.
            RuntimeError: a rank has left (see `leave`), or this one did, earlier.
        """
        if self._broken:
            raise RuntimeError(
                f"this shared memory can no longer be used: {self._broken}"
            )
        self.count += 1
        self._arrived[self.rank] = self.count
        post, take = self._post, self._try
        try:
            for theirs, mine in self._rounds:
                post(theirs)
                if take(mine):
                    self._wait(mine)
        except TimeoutError as error:
            self._broken = str(error)
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def meet(self, meeting: Callable[[], object] | None = None) -> None:
        """Call `meeting`, which passes one barrier of this segment; None: just that.

        Raises:
            RuntimeError: it passed none, or more: the pages are out of turn.
        """
        before = self.count
        (meeting or self.barrier)()
        if self.count != before + 1:
            error = f"a meeting passed {self.count - before} barriers here, not one"
            self.leave(RuntimeError(error))
            raise RuntimeError(error)

    def __enter__(self) -> Segment:
        """Begin what the other ranks rely on: see `leave`."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """Leave if that failed."""
        if error is not None:
            self.leave(error)

    def leave(self, why: BaseException) -> None:
        """Tell the others that this rank comes to no barrier any more.

        For a rank that fails between two barriers: the others then fail at the next
        one, and not at its deadline.
        """
        if self._broken is None:
            self._left[self.rank] = 1
            self._broken = f"rank {self.rank} left it: {type(why).__name__}: {why}"

    def _wait(self, semaphore: ctypes.c_void_p) -> None:
        take, give_way = self._try, os.sched_yield
        for _ in range(SPINS):  # waking a sleeper takes longer than most waits
            if not take(semaphore):
                return
            give_way()
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            if _sleep_at(semaphore, max(0.0, min(SLICE, left))):
                if self.watch:
                    self.watch(None)
                return
            gone = [r for r in range(self.size) if self._left[r]]
            if gone:
                raise RuntimeError(f"{_ranks(gone)} failed and left this shared memory")
            late = [r for r in range(self.size) if self._arrived[r] < self.count]
            if self.watch:
                self.watch(late)
            if left <= 0:
                raise TimeoutError(
                    f"{_ranks(late)} of {self.size} did not arrive within "
                    f"{self.timeout:g} s; rank {self.rank} waited"
                )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _rounds(size: int) -> int:
    return (size - 1).bit_length()


def _head(size: int) -> int:
    """Return the bytes of counters and semaphores, each in a cache line."""
    return round_up(LINE * size * (1 + _rounds(size)), PAGE)


def share(
    nbytes: int, rank: int, size: int, exchange: Exchange, timeout: float = 1800.0
) -> Segment:
    """Return a segment of `nbytes` bytes of zeros; called by all `size` ranks.

    Args:
        nbytes: free bytes in it, the same on all ranks.
        rank: the calling rank, 0 to size - 1.
        size: the number of ranks.
        exchange: shows an object to all ranks and returns everyone's, in rank order.
        timeout: seconds that a rank waits at a barrier for the others; as long as gloo
            by default.

    Raises:
        OSError: on all ranks, if one cannot have the memory; says which one, and why.

    Chapter 03.
    """
    memory = shared_memory(_head(size) + nbytes, rank, exchange)
    if rank == 0:
        for cell in range(size, size * (1 + _rounds(size))):
            address = ctypes.c_void_p(memory.data_ptr() + LINE * cell)
            _libc().sem_init(address, 1, 0)  # 1: shared by processes; 0: not posted
    exchange(None)  # nobody posts before that
    return Segment(memory, rank, size, timeout)
