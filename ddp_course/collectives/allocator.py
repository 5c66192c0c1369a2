"""Memory that the ranks of one machine have in common: one mapping in every rank.

The memory is a file without a name: nothing is ever to be found in /dev/shm, and it is
gone when the last rank is gone, even after `kill -9`. Explained in chapter 03.
"""

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Exchange = Callable[[Any], Sequence[Any]]  # shows an object to all ranks, returns all

LINE = 64  # bytes of a cache line: what two ranks write often must not share one
PAGE = 4096  # bytes


def container() -> tuple[str, str] | None:
    """Return what ranks that can have memory in common have in common.

    That is when the kernel was started (its boot id), and the namespace in which
    process numbers count. None if this is not Linux: then they cannot.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        return boot, str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def machine(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return what ranks on one node have in common, and no others.

    That is the machine's name and when its kernel was started; and the node's number,
    since `spawn` has several nodes on one machine.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        boot = ""
    return socket.gethostname(), boot, environ.get("GROUP_RANK", "")


def allocate(nbytes: int, rank: int, exchange: Exchange) -> Tensor:
    """Return the same `nbytes` bytes of zeros in every rank; called by all ranks.

    As a tensor of uint8, which begins with a page of the memory; `nbytes`, 1 or more,
    are the same on all ranks. Rank 0 makes a file without a name and tells its process
    number and file descriptor; the others open it through /proc. When all have mapped
    it, it is closed: the mapping remains until the last tensor that looks into it is
    gone. `exchange` is such as `all_gather_object`.

    Raises OSError, on all ranks, if one cannot have the memory; says which one, and
    why. Chapter 03.
    """
    fd, memory, offer, problem = -1, None, None, None
    how = {"shared": True, "size": nbytes, "dtype": torch.uint8}
    try:
        if rank == 0:
            try:
                fd, offer = _create(nbytes)
            except Exception as error:  # whatever it is, the others must know
                problem = f"cannot make it: {error}"
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


def round_up(nbytes: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is at least `nbytes`."""
    return -(-nbytes // unit) * unit
