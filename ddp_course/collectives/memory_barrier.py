"""A barrier in shared memory, at which the ranks may also compare a text.

On one machine ranks need no message to wait for each other: they can read the same
memory. As they wait anyhow, comparing their calls costs almost nothing (`Barrier.meet`;
chapter 02).

All use of shared memory obeys one rule, with two pages that take turns:

    Before barrier number c, each rank writes to its own places on page c % 2. Ranks
    read this page after that barrier and before the next.

So a reader has passed the barrier at which the writer was done; and a page is written
again only after one more barrier, at which all its readers have arrived. No place is
ever written and read at the same time. Explained in chapter 03.
"""

import ctypes
import hashlib
import os
import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Self

import torch
from torch import Tensor

from ddp_course.collectives.allocator import LINE, PAGE, Exchange, allocate, round_up
from ddp_course.launch.deadlock import ranks_in_words

SPINS = 2000  # tries at a semaphore before the rank sleeps: about 1 ms
NAP = 0.5  # seconds of sleep between two checks of the deadline and for Ctrl-C
LONGEST = PAGE - 8  # bytes of a text that the other ranks see
TIMEOUT = 1800.0  # seconds that a rank waits for the others; gloo's default


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _sleep_at(semaphore: ctypes.c_void_p, seconds: float) -> bool:
    """Sleep until the semaphore is posted, and take it; return False after `seconds`.

    Uses the clock that a user can set, as not all C libraries offer another one here. A
    post wakes the sleeper in any case.
    """
    until = time.time_ns() + int(seconds * 1e9)
    until = ctypes.byref(_Time(*divmod(until, 10**9)))
    return _libc().sem_timedwait(semaphore, until) == 0


@lru_cache(maxsize=1000)
def _hashed(text: str) -> tuple[bytes, bytes]:
    """Return a text as bytes, and its hash of 8 bytes; cached, as calls repeat."""
    encoded = text.encode()
    return encoded, hashlib.blake2b(encoded, digest_size=8).digest()


class Barrier:
    """A place in shared memory where a few ranks wait for each other.

    `count` is the number of barriers so far, the same on all ranks, and `turn`, 0 or 1,
    the page that may be written now.

    It is a dissemination barrier: in round k, each rank signals the rank 2**k places
    ahead that it and all ranks that it knows of have arrived, and waits for the rank
    2**k places behind; after ceil(log2(size)) rounds each rank knows that all have
    arrived. The signal is a POSIX semaphore in the shared memory. Unlike plain flags,
    semaphores order reads and writes on every CPU, and a rank can sleep at one.

    Args:
        rank, size: the calling rank, 0 to size - 1, and the number of ranks.
        exchange: all-gathers an object, in rank order.
        timeout: seconds that a rank waits for the others.
        watch: called every half second of a long wait with the ranks that have not
            arrived, and with None when the wait ends.

    All ranks construct it together. Raises OSError, on all ranks, if one cannot map the
    memory. Source: Hensgen, Finkel, Manber 1988, "Two algorithms for barrier
    synchronization". Chapter 03.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        exchange: Exchange,
        timeout: float = TIMEOUT,
        watch: Callable[[list[int] | None], None] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.timeout, self.watch = timeout, watch
        self.count = 0
        self._broken: str | None = None
        rounds = (size - 1).bit_length()
        head = LINE * size * (1 + rounds)  # counters and semaphores, a line for each
        page = round_up(8 * size, LINE) + PAGE * size  # hashes, then texts
        memory = allocate(round_up(head, PAGE) + 2 * page, rank, exchange)
        self._memory = memory  # keeps the addresses below valid
        # Two numbers per rank: how many barriers it has reached; whether it has left.
        counters = memory[: LINE * size].view(torch.int64).numpy()
        self._arrived = memoryview(counters[:: LINE // 8])
        self._left = memoryview(counters[1 :: LINE // 8])
        self._post, self._try = _libc().sem_post, _libc().sem_trywait

        def semaphore(rank: int, k: int) -> ctypes.c_void_p:
            """Return the address of the semaphore at which `rank` waits in round k."""
            return ctypes.c_void_p(memory.data_ptr() + LINE * (size * (1 + k) + rank))

        self._rounds = [
            (semaphore((rank + 2**k) % size, k), semaphore(rank, k))
            for k in range(rounds)
        ]
        if rank == 0:
            for k in range(rounds):
                for r in range(size):  # 1: shared by processes; 0: not posted
                    _libc().sem_init(semaphore(r, k), 1, 0)
        pages = memory[round_up(head, PAGE) :].view(2, page)
        self._hashes = [memoryview(p[: 8 * size].numpy()) for p in pages]
        self._texts = [_rows(p[-PAGE * size :].view(size, PAGE)) for p in pages]
        self._shown: list[bytes | None] = [None, None]  # this rank's hash, by page
        exchange(None)  # no rank posts before all semaphores are initialised

    @property
    def turn(self) -> int:
        """The page, 0 or 1, that may be written until the next barrier."""
        return self.count & 1

    def wait(self) -> None:
        """Wait until all ranks have arrived.

        Raises:
            TimeoutError: some ranks did not arrive within `timeout` seconds; names
                them.
            RuntimeError: a rank has left (see `leave`), or this barrier failed before.
        """
        if why := self._broken:
            raise RuntimeError(f"this shared memory can no longer be used: {why}")
        self.count += 1
        self._arrived[self.rank] = self.count
        post, take = self._post, self._try
        try:
            for theirs, mine in self._rounds:
                post(theirs)
                if take(mine):
                    self._wait_at(mine)
        except TimeoutError as error:
            self._broken = str(error)
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def meet(self, text: str) -> list[str] | None:
        """Wait for all and compare texts; return None if all are equal, else all texts.

        The hashes of whole texts are compared; only `LONGEST` bytes are returned. A
        text that is on this page already is not written again. Raises what `wait` does.
        """
        encoded, digest = _hashed(text)
        page = self.turn
        if self._shown[page] != digest:
            encoded = encoded[:LONGEST]
            place = self._texts[page][self.rank]
            place[:8] = len(encoded).to_bytes(8, "little")
            place[8 : 8 + len(encoded)] = encoded
            self._hashes[page][8 * self.rank : 8 * self.rank + 8] = digest
            self._shown[page] = digest
        self.wait()
        if self._hashes[page] == digest * self.size:
            return None
        ends = [8 + int.from_bytes(place[:8], "little") for place in self._texts[page]]
        shown = zip(self._texts[page], ends, strict=True)
        return [bytes(text[8:end]).decode(errors="ignore") for text, end in shown]

    def __enter__(self) -> Self:
        """Enter a block; if it fails, the other ranks are notified (`leave`)."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None:
            self.leave(error)

    def leave(self, why: BaseException) -> None:
        """Notify the other ranks that this rank will not arrive at the next barrier.

        For a rank that fails between two barriers: the others then fail at the next
        barrier, without waiting for its timeout.
        """
        if self._broken is None:
            self._left[self.rank] = 1
            self._broken = f"rank {self.rank} left it: {type(why).__name__}: {why}"

    def _wait_at(self, semaphore: ctypes.c_void_p) -> None:
        take, give_way = self._try, os.sched_yield
        for _ in range(SPINS):  # waking a sleeper takes longer than most waits
            if not take(semaphore):
                return
            give_way()
        deadline = time.monotonic() + self.timeout
        while True:
            left = deadline - time.monotonic()
            if _sleep_at(semaphore, max(0.0, min(NAP, left))):
                if self.watch:
                    self.watch(None)
                return
            gone = [r for r in range(self.size) if self._left[r]]
            if gone:
                who = ranks_in_words(gone)
                raise RuntimeError(f"{who} failed and left this shared memory")
            late = self._late()
            if self.watch:
                try:
                    self.watch(late)
                except RuntimeError:
                    if self._late() == late:  # else one has come, and left, meanwhile
                        raise
            if left <= 0:
                raise TimeoutError(
                    f"{ranks_in_words(late)} of {self.size} did not arrive within "
                    f"{self.timeout:g} s; rank {self.rank} waited"
                )

    def _late(self) -> list[int]:
        """Return the ranks that have not arrived at this barrier yet."""
        return [r for r in range(self.size) if self._arrived[r] < self.count]


def _rows(table: Tensor) -> list[memoryview]:
    return [memoryview(row.numpy()) for row in table]
