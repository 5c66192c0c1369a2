"""A barrier in shared memory, at which each rank may show what it came for.

On one machine ranks need no message to wait for each other: they can look at the same
memory. And as they wait anyhow, they see for next to nothing whether all of them have
come for the same (`Barrier.meet`; chapter 02).

All that ranks do in shared memory obeys one rule, of two pages that take turns:

    What is written before barrier number c is written on page c % 2, each rank in
    places of its own. It is read after that barrier and before the next.

So whoever reads has passed the barrier at which the writer was done; and a page is
written again only behind one more barrier, at which all have arrived that read it. No
place is ever written and read at once. Explained in chapter 03.
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

SPINS = 2000  # looks at a semaphore before going to sleep: about 1 ms
NAP = 0.5  # seconds asleep before looking up for a deadline, or for Ctrl-C
LONGEST = PAGE - 8  # bytes of a text that are shown to the others
TIMEOUT = 1800.0  # seconds that a rank waits for the others; gloo's own by default


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _sleep_at(semaphore: ctypes.c_void_p, seconds: float) -> bool:
    """Sleep until the semaphore is posted, and take it; False if that was too long.

    By the clock that somebody may set, as not all C libraries know another one here:
    a post wakes the sleeper all the same.
    """
    until = time.time_ns() + int(seconds * 1e9)
    until = ctypes.byref(_Time(*divmod(until, 10**9)))
    return _libc().sem_timedwait(semaphore, until) == 0


@lru_cache(maxsize=1000)
def _hashed(text: str) -> tuple[bytes, bytes]:
    """Return a text as bytes, and its hash of 8 bytes; kept, as calls repeat."""
    encoded = text.encode()
    return encoded, hashlib.blake2b(encoded, digest_size=8).digest()


class Barrier:
    """A place in shared memory where a few ranks wait for each other.

    `count` is the number of barriers so far, on all ranks alike, and `turn`, 0 or 1,
    the page that may be written now.

    It is a dissemination barrier: in round k, each rank tells the one 2**k places
    further that it has arrived (with all whom it heard of), and waits for the one 2**k
    places behind; after ceil(log2(size)) rounds each has heard of all. It "tells" by a
    POSIX semaphore in the shared memory. Those, unlike plain flags, put reads and
    writes in order on every CPU, and a rank can sleep at one.

    Args:
        rank, size: the calling rank, 0 to size - 1, and their number.
        exchange: shows an object to all ranks and returns everyone's, in rank order.
        timeout: seconds that a rank waits for the others.
        watch: called while a rank waits for long: with those who are late, again and
            again, and with None when all have come.

    Made by all ranks together. Raises OSError, on all of them, if one cannot have the
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
        self._memory = memory  # the addresses below are valid as long as this is
        # Two numbers of each rank: how many barriers it came to; whether it has left.
        told = memory[: LINE * size].view(torch.int64).numpy()
        self._arrived = memoryview(told[:: LINE // 8])
        self._left = memoryview(told[1 :: LINE // 8])
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
        self._shown: list[bytes | None] = [None, None]  # hash of the own text, by page
        exchange(None)  # nobody posts before that

    @property
    def turn(self) -> int:
        """The page, 0 or 1, that may be written until the next barrier."""
        return self.count & 1

    def wait(self) -> None:
        """Wait until all ranks are here.

        Raises:
            TimeoutError: some did not arrive within `timeout` seconds; names them.
            RuntimeError: a rank has left (see `leave`), or this one did, earlier.
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
        """Wait for all, showing `text`; return None if all are equal, else all of them.

        Of a text longer than `LONGEST` bytes the others are shown as much; compared is
        the hash of all of it. Nothing is written if it is already there. Errors: as
        `wait`.
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
        """Begin what the other ranks rely on: see `leave`."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
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
            late = [r for r in range(self.size) if self._arrived[r] < self.count]
            if self.watch:
                self.watch(late)
            if left <= 0:
                raise TimeoutError(
                    f"{ranks_in_words(late)} of {self.size} did not arrive within "
                    f"{self.timeout:g} s; rank {self.rank} waited"
                )


def _rows(table: Tensor) -> list[memoryview]:
    return [memoryview(row.numpy()) for row in table]
