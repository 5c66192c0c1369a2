"""What this machine has, and what a container, a batch system or a seat leaves of it.

A process may use fewer cores than the machine has (its affinity, the CPU quota of its
control group) and less memory (the control group's limit): counting the machine's
promises too much. Control groups come in two versions with different file names.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path("/")


@dataclass(frozen=True)
class Machine:
    """What a process may use here; sizes in bytes, None where it cannot be known."""

    cores: float
    all_cores: int
    memory: int | None
    all_memory: int | None
    gpus: tuple[str, ...]
    backends: tuple[str, ...]
    shared_memory: int | None  # the size of /dev/shm


def this_machine() -> Machine:
    """Look at the machine that we are on."""
    return Machine(
        cores=cores(),
        all_cores=os.cpu_count() or 1,
        memory=memory(),
        all_memory=physical_memory(),
        gpus=tuple(
            torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())
        ),
        backends=tuple(
            name
            for name in ("gloo", "nccl", "mpi", "ucc")
            if getattr(dist, f"is_{name}_available")()
        ),
        shared_memory=shared_memory(),
    )


def cores(root: Path = ROOT) -> float:
    """Return how many cores this process may use; a quota can be 1.5 cores."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return min([allowed, *_limits("cpu", _cpu_quota, root)])


def memory(root: Path = ROOT) -> int | None:
    """Return how many bytes of memory this process and its kin may use."""
    limits = [physical_memory(), *_limits("memory", _memory_limit, root)]
    return min((limit for limit in limits if limit is not None), default=None)


def physical_memory() -> int | None:
    """Return how many bytes of memory the machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def shared_memory(folder: Path = Path("/dev/shm")) -> int | None:
    """Return the size of the file system that shared tensors live in."""
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def _limits(controller: str, read: Callable, root: Path) -> Iterator[float]:
    """Yield the limits of this process's control group and of all those above it.

    In a container the path of the group may be the one outside: then only the top
    folder exists, and that is the container's own group.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree for all
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = top / path.strip("/")
        for folder in (group, *group.parents):
            limit = read(folder)
            if limit is not None:
                yield limit
            if folder == top:
                break


def _cpu_quota(group: Path) -> float | None:
    """Return the cores that a group may keep busy on average."""
    quota, _, period = _text(group / "cpu.max").partition(" ")  # version 2
    if not quota:
        quota = _text(group / "cpu.cfs_quota_us")
        period = _text(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdecimal() else None  # "max" or -1: none


def _memory_limit(group: Path) -> int | None:
    limit = _text(group / "memory.max") or _text(group / "memory.limit_in_bytes")
    return int(limit) if limit.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def in_words(size: float | None) -> str:
    """Return a size in bytes as a person says it: "64 MiB", "1.5 GiB"."""
    if size is None:
        return "unknown"
    power = min(max(int(math.log(size, 1024)), 0), 4) if size else 0
    number = size / 1024**power
    digits = 0 if number >= 10 or number == int(number) else 1
    return f"{number:.{digits}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
