"""Shared memory of the ranks of one machine.

The memory is a file without a name: it is never visible in /dev/shm, and the kernel
frees it when the last rank ends, even after `kill -9`. Explained in chapter 03.
"""

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Exchange = Callable[[Any], Sequence[Any]]  # all-gathers an object, in rank order

LINE = 64  # bytes of a cache line: two ranks must not write to the same line often
PAGE = 4096  # bytes


def container() -> tuple[str, str] | None:
    """Return an identifier that is equal on ranks that can share memory.

    It consists of the kernel's boot id and the namespace of process ids. None if this
    is not Linux: then ranks cannot share memory.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot, str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def allocate(nbytes: int, rank: int, exchange: Exchange) -> Tensor:
    """Return the same `nbytes` bytes of zeros in every rank; called by all ranks.

    The result is a tensor of uint8 that begins at a page of the memory; `nbytes`, 1 or
    more, is the same on all ranks. Rank 0 creates a file without a name and sends its
    process id and file descriptor; the others open the file through /proc. When all
    ranks have mapped the file, they close it: the mapping remains until the last tensor
    that uses it is freed. `exchange` works like `all_gather_object`.

    Raises OSError, on all ranks, if a rank cannot create or map the memory; the error
    names this rank and the reason. Chapter 03.
    """
    fd, memory, offer, problem = -1, None, None, None
    how = {"shared": True, "size": nbytes, "dtype": torch.uint8}
    try:
        if rank == 0:
            try:
                fd, offer = _create(nbytes)
            except Exception as error:  # the other ranks must know
                problem = f"cannot create it: {error}"
        offer = exchange(offer)[0]
        if offer is not None:
            try:
                fd = fd if rank == 0 else _open(*offer)
                # Unlike Python's mmap, from_file keeps no file descriptor of its own.
                memory = torch.from_file(f"/proc/self/fd/{fd}", **how)
            except Exception as error:
                problem = f"cannot map it: {error}"
        problems = {r: p for r, p in enumerate(exchange(problem)) if p is not None}
    finally:
        if fd >= 0:
            os.close(fd)
    if problems:
        text = "; ".join(f"rank {r} {p}" for r, p in problems.items())
        raise OSError(f"no {nbytes} bytes of shared memory: {text}")
    return memory


def _create(nbytes: int) -> tuple[int, tuple[int, int, str]]:
    """Return a new file descriptor, and the arguments with which others `_open` it."""
    name = f"ddp-course-{secrets.token_hex(8)}"
    fd = os.memfd_create(name)  # programs that this process executes do not inherit it
    try:
        # Without a reservation, a lack of memory shows later, as a crash.
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        os.close(fd)
        raise
    return fd, (os.getpid(), fd, name)


def _open(pid: int, fd: int, name: str) -> int:
    """Return a file descriptor of the file that process `pid` has open as `fd`."""
    path = Path(f"/proc/{pid}/fd/{fd}")
    if name not in str(path.readlink()):  # `pid` is another process in this container
        raise OSError(f"{path} is another file here: not one machine, or container")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def round_up(nbytes: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit
