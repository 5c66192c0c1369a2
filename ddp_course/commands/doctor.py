"""`doctor`: describe this machine and how ranks run on it, then launch four ranks.

A process may use fewer cores than the machine has (because of its affinity, or the CPU
quota of its control group) and less memory (because of the control group's limit), so
these limits are read, too. The two versions of control groups use different file names.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from ddp_course.commands.proofs import prove_all_reduce
from ddp_course.launch.devices import choose
from ddp_course.launch.topology import Topology

BACKENDS = ("gloo", "nccl", "mpi", "ucc")
PACKAGES = ("torch", "ipykernel", "jupyterlab", "ddp-course")
MIB, GIB = 2**20, 2**30
ROOT = Path("/")
RESULTS = Path(__file__).with_name("gpu_results.json")  # written by `pytest tests/gpu`


@dataclass(frozen=True)
class Machine:
    """The resources that a process may use here; sizes in bytes, None if unknown."""

    cores: float
    all_cores: int
    memory: int | None
    all_memory: int | None
    gpus: tuple[str, ...]
    backends: tuple[str, ...]
    shared_memory: int | None  # the size of /dev/shm


def this_machine() -> Machine:
    """Return the resources of the machine that this process runs on."""
    return Machine(
        cores=cores(),
        all_cores=os.cpu_count() or 1,
        memory=memory(),
        all_memory=physical_memory(),
        gpus=tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))),
        backends=tuple(b for b in BACKENDS if getattr(dist, f"is_{b}_available")()),
        shared_memory=shared_memory(),
    )


def cores(root: Path = ROOT) -> float:
    """Return how many cores this process may use; a quota can be 1.5 cores."""
    allowed = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    return min([allowed, *_limits("cpu", _cpu_quota, root)])


def memory(root: Path = ROOT) -> int | None:
    """Return how many bytes of memory this process's control group may use."""
    limits = [physical_memory(), *_limits("memory", _memory_limit, root)]
    return min((limit for limit in limits if limit is not None), default=None)


def physical_memory() -> int | None:
    """Return how many bytes of memory the machine has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def shared_memory(folder: Path = Path("/dev/shm")) -> int | None:
    """Return the size of the file system that holds shared tensors, in bytes."""
    return shutil.disk_usage(folder).total if folder.is_dir() else None


def _limits(controller: str, read: Callable, root: Path) -> Iterator[float]:
    """Yield the limits of this process's control group and of all its parents.

    In a container, /proc may name the group by its path on the host. Then only the top
    folder exists, and its limits are the container's.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2: one tree for all controllers
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
    return int(quota) / int(period) if quota.isdecimal() else None  # no limit: max, -1


def _memory_limit(group: Path) -> int | None:
    limit = _text(group / "memory.max") or _text(group / "memory.limit_in_bytes")
    return int(limit) if limit.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def in_words(size: float | None) -> str:
    """Return a size in bytes with a suitable unit: "64 MiB", "1.5 GiB"."""
    if size is None:
        return "unknown"
    power = min(max(int(math.log(size, 1024)), 0), 4) if size else 0
    number = size / 1024**power
    digits = 0 if number >= 10 or number == int(number) else 1
    return f"{number:.{digits}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def command(_: object = None) -> int:
    """Print the facts, advice, and the result of a launch. Returns the exit code."""
    machine = this_machine()
    table = Table(show_header=False)
    for row in facts(machine).items():
        table.add_row(*row)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for sentence in (*advice(machine), tried_on_gpus(), prove_all_reduce()):
        console.print(sentence, markup=False)
    print(
        "Trouble? See notebooks/trouble.md. For help, send: ddp-course doctor --report"
    )
    return 0


def facts(machine: Machine) -> dict[str, str]:
    """Return the resources and versions in a few words each, by name."""
    cores = f"{machine.cores:g}"
    if machine.cores < machine.all_cores:
        cores += f" of the machine's {machine.all_cores}"
    memory = in_words(machine.memory)
    if machine.memory != machine.all_memory:
        memory += f" of the machine's {in_words(machine.all_memory)}"
    backends = ", ".join(machine.backends)
    if missing := [name for name in BACKENDS if name not in machine.backends]:
        backends += f" (not in this PyTorch: {', '.join(missing)})"
    shared, versions = "no /dev/shm", [f"Python {platform.python_version()}"]
    if machine.shared_memory is not None:
        shared = f"{in_words(machine.shared_memory)} in /dev/shm"
    return {
        "cores": cores,
        "memory": memory,
        "GPUs": ", ".join(machine.gpus) or "none",
        "backends": backends,
        "shared memory": shared,
        "versions": ", ".join([*versions, *map(_version, PACKAGES)]),
    }


def advice(machine: Machine, ranks: int = 4) -> list[str]:
    """Return sentences about how ranks will run here, and warnings."""
    return [how_ranks_run(machine, ranks), *warnings(machine)]


def how_ranks_run(machine: Machine, ranks: int) -> str:
    """Return where `ranks` ranks run, over which backend, and whether in turns."""
    gpus = len(machine.gpus)
    placement = choose(Topology(1, ranks), gpus=gpus)
    if placement.gpus:
        return f"{ranks} ranks run on {ranks} GPUs, one each, over NCCL."
    cores = f"{machine.cores:g} core" + "s" * (machine.cores != 1)
    text = f"{ranks} ranks run on {cores} over {placement.backend}; "
    if gpus:
        text += f"the {gpus} GPU{'s are' if gpus > 1 else ' is'} used by up to {gpus} "
        text += "ranks, or shared with share_gpus=True. "
    else:
        text += "there is no GPU. "
    if machine.cores >= ranks:
        return text + "Every rank has a core of its own."
    return text + (
        f"They take turns, so {ranks} ranks are not faster than one here; numbers, "
        "bytes and order of messages are as on a cluster."
    )


def warnings(machine: Machine) -> list[str]:
    """Return a warning for each resource that is too small: its effect, its remedy."""
    found = []
    if machine.memory is not None and machine.memory < 2 * GIB:
        found.append(
            f"Memory is scarce: {in_words(machine.memory)}. JupyterLab, a notebook and "
            "4 ranks need about 1.5 GiB; close other notebooks."
        )
    if machine.shared_memory is not None and machine.shared_memory <= 64 * MIB:
        found.append(
            f"/dev/shm has {in_words(machine.shared_memory)}, a container's default. "
            "Ranks run, but processes with DataLoader workers or large shared tensors "
            'end with "Bus error": start the container with --shm-size=2g or '
            "--ipc=host."
        )
    return found


def tried_on_gpus(results: Path = RESULTS, today: date | None = None) -> str:
    """Return when the tests on GPUs were run last, on which GPUs, and what failed."""
    if not results.exists():
        return (
            "The course's code for GPUs has never been tested on a GPU; "
            "`pytest tests/gpu` tests it."
        )
    last = json.loads(results.read_text())
    days = ((today or date.today()) - date.fromisoformat(last["date"])).days
    ago = f"{days} day{'s' * (days != 1)} ago"
    failed = f", failed: {', '.join(last['failed'])}" if last["failed"] else ""
    return (
        f"On GPUs ({', '.join(sorted(set(last['gpus'])))}, torch {last['torch']}, NCCL "
        f"{last['nccl']}) {len(last['passed'])} tests passed {ago}{failed}."
    )


def _version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"no {package}"
