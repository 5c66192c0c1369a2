"""Memory that the ranks of one machine share, and how they wait for each other in it.

On one machine a message need not be sent: both ranks can look at the same memory. Read
in this order:

    shared_memory  one mapping of the same memory in every rank
    Segment        such a mapping, with semaphores in it: `barrier`
    Meeting        a barrier at which each rank shows what it came for

The memory is a file without a name: nothing is ever to be found in /dev/shm, and it is
gone when the last rank is gone, even after `kill -9`.

All that the ranks do in a segment obeys one rule, of two pages that take turns:

    What is written before barrier number c is written on page c % 2, each rank in
    places of its own. It is read after that barrier and before the next.

So whoever reads has passed the barrier at which the writer was done; and a page is
written again only behind one more barrier, at which all have arrived that read it. No
place is ever written and read at once. Explained in chapter 03.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Exchange = Callable[[Any], Sequence[Any]]  # shows an object to all ranks, returns all

LINE = 64  # bytes of a cache line: what two ranks write often must not share one
PAGE = 4096  # bytes
SPINS = 2000  # looks at a semaphore before going to sleep: about 1 ms
SLICE = 0.5  # seconds asleep before looking up for a deadline, or for Ctrl-C


# ---- the same memory in every rank -------------------------------------------------


def same_machine(exchange: Exchange) -> bool:
    """Tell whether all ranks run on one machine, in one container; called by all.

    Compares when the kernel was started (its boot id) and the namespace in which
    process numbers count.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        here = (boot, str(Path("/proc/self/ns/pid").readlink()))
    except OSError:
        here = None  # not Linux
    told = exchange(here)
    return here is not None and all(other == here for other in told)


def shared_memory(nbytes: int, rank: int, exchange: Exchange) -> Tensor:
    """Return the same `nbytes` bytes of zeros in every rank; called by all ranks.

    Rank 0 makes a file without a name and tells its process number and file
    descriptor; the others open it through /proc. When all have mapped it, it is closed:
    the mapping remains until the last tensor that looks into it is gone.

    Args:
        nbytes: the number of bytes, the same on all ranks, 1 or more.
        rank: the calling rank.
        exchange: shows an object to all ranks and returns everyone's, in rank order,
            such as `all_gather_object`.

    Returns:
        a tensor of `nbytes` uint8, at the beginning of a page of the memory.

    Raises:
        OSError: on all ranks, if one cannot have the memory; says which one, and why.

    Chapter 03.
    """
    fd, memory = -1, None
    try:
        offer, problem = None, None
        if rank == 0:
            try:
                fd, offer = _create(nbytes)
            except Exception as error:  # whatever it is, the others must know
                problem = f"cannot make it: {error}"
        offer = exchange(offer)[0]
        if offer is not None:
            try:
                if rank != 0:
                    fd = _open(*offer)
                memory = _map(fd, nbytes)
            except Exception as error:
                problem = f"cannot map it: {error}"
        problems = {r: p for r, p in enumerate(exchange(problem)) if p is not None}
    finally:
        if fd >= 0:
            os.close(fd)
    if problems:
        what = "; ".join(f"rank {r} {p}" for r, p in problems.items())
        raise OSError(f"no {nbytes} bytes of shared memory: {what}")
    return memory


def _create(nbytes: int) -> tuple[int, tuple[int, int, str]]:
    """Return a new file descriptor, and what others must know to open it."""
    name = f"ddp-course-{secrets.token_hex(8)}"
    fd = os.memfd_create(name)  # closed in whatever this process executes
    try:
        # Without a reservation, memory that is short shows itself late and as a crash.
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd, (os.getpid(), fd, name)


def _open(pid: int, fd: int, name: str) -> int:
    """Return a file descriptor of the file that process `pid` has open as `fd`."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    if name not in str(path.readlink()):  # in another container: another process
        raise OSError(f"{path} is another file here: not one machine, or container")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _map(fd: int, nbytes: int) -> Tensor:
    # Unlike Python's mmap, from_file keeps no file descriptor of its own.
    path = f"/proc/self/fd/{fd}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def round_up(nbytes: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit


# ---- waiting for each other --------------------------------------------------------


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


# ---- a barrier with something to show ----------------------------------------------


class Notice:
    """What a rank has come to a meeting for: a text, and its hash of 8 bytes.

    Of a text longer than 4096 bytes the others are shown as much; the hash is of all.
    """

    LONGEST = PAGE

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.hash = hashlib.blake2b(text, digest_size=8).digest()


class Meeting:
    """A barrier at which every rank shows a notice, and sees whether all are equal.

    That ranks agree on what they are about to do costs them next to nothing, as they
    must wait for each other anyhow. Nothing is written if the notice is already there.

    Chapter 03.
    """

    def __init__(self, segment: Segment, offset: int = 0) -> None:
        """Use `Meeting.nbytes(size)` bytes of the segment, from `offset` on."""
        self.segment = segment
        size, half = segment.size, self.nbytes(segment.size) // 2
        pages = segment.view(offset, (2, half), torch.uint8)
        edge = round_up(8 * size, LINE)
        self._hashes = [memoryview(page[: 8 * size].numpy()) for page in pages]
        self._texts = [
            [memoryview(text.numpy()) for text in page[edge:].view(size, -1)]
            for page in pages
        ]
        self._shown: list[bytes | None] = [None, None]  # hash of the own notice

    @staticmethod
    def nbytes(size: int) -> int:
        """Return how many bytes of a segment the meetings of `size` ranks need."""
        return 2 * (round_up(8 * size, LINE) + size * (LINE + Notice.LONGEST))

    def meet(self, notice: Notice | bytes) -> list[bytes] | None:
        """Wait for all ranks; return None if all notices are equal, else all of them.

        Raises:
            TimeoutError, RuntimeError: as `Segment.barrier`.
        """
        if isinstance(notice, bytes):
            notice = Notice(notice)
        segment = self.segment
        page = segment.count & 1
        if self._shown[page] != notice.hash:
            self._show(notice, page)
        segment.barrier()
        if self._hashes[page] == notice.hash * segment.size:
            return None
        return [self._read(text) for text in self._texts[page]]

    def _show(self, notice: Notice, page: int) -> None:
        rank, text = self.segment.rank, notice.text[: Notice.LONGEST]
        place = self._texts[page][rank]
        place[:8] = len(text).to_bytes(8, "little")
        place[LINE : LINE + len(text)] = text
        self._hashes[page][8 * rank : 8 * rank + 8] = notice.hash
        self._shown[page] = notice.hash

    @staticmethod
    def _read(place: memoryview) -> bytes:
        length = int.from_bytes(place[:8], "little")
        return bytes(place[LINE : LINE + length])
