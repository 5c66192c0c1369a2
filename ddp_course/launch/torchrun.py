"""Join and leave the process group in a process that torchrun started.

torchrun passes the rank and the address of its store in environment variables. `join`
creates the process group from them, as `spawn` does for its ranks. Chapter 01.
"""

import datetime
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # early: later, its defaults would keep the group

from ddp_course.launch.rendezvous import loopback_interface, store_of_torchrun
from ddp_course.launch.reports import RankReport
from ddp_course.launch.topology import device, here, launcher_variables


def under_torchrun() -> bool:
    """Return whether a launcher that sets MASTER_ADDR started this process."""
    has_rank = "RANK" in os.environ or here().world_size > 1
    return has_rank and "MASTER_ADDR" in os.environ


def check_alone() -> None:
    """Raise ValueError if a launcher started this process as one of several.

    SLURM and MPI do not set MASTER_ADDR, so each rank would train alone.
    """
    place = here()
    if place.world_size > 1 and not dist.is_initialized():
        raise ValueError(
            f"SLURM, MPI or another launcher started this process as rank {place.rank} "
            f"of {place.world_size}, but it did not say where the ranks meet. Let it "
            f"start torchrun on each node (see the README), or set MASTER_ADDR and "
            f"MASTER_PORT to an address that all ranks can reach"
        )


def check_variables() -> None:
    """Raise ValueError if the launcher's variables cannot bring the ranks together.

    If one is missing, or a rank is outside of the world, ranks would wait in silence.
    """
    known = {**os.environ, **launcher_variables(os.environ)}
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in known]
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: not set. Start this program with torchrun, which "
            "sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; under SLURM or MPI, "
            "set MASTER_ADDR and MASTER_PORT yourself"
        )
    rank, world_size = known["RANK"], known["WORLD_SIZE"]
    numbers = rank.isdecimal() and world_size.isdecimal()
    if not numbers or int(rank) >= int(world_size):
        raise ValueError(
            f"RANK is {rank!r} and WORLD_SIZE {world_size!r}; they must be whole "
            "numbers, with RANK from 0 to WORLD_SIZE - 1"
        )


def join(
    timeout: datetime.timedelta = datetime.timedelta(minutes=10),
    backend: str | None = None,
) -> dist.Store:
    """Create the default process group and return the store that its ranks share.

    It uses NCCL for tensors on GPUs and gloo for others; or `backend`, on the CPU.
    Raises ValueError if a variable such as RANK is missing.
    """
    check_variables()
    if backend is not None:
        os.environ["DDP_COURSE_DEVICE"] = "cpu"
    place, mine = here(), device()
    os.environ.update(place.environment())  # SLURM and MPI use other names
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    if place.topology.nnodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    store = store_of_torchrun(timeout)
    options: dict[str, Any] = {"backend": backend or "gloo"}
    if mine.type == "cuda":
        torch.cuda.set_device(mine)
        options = {"backend": "cpu:gloo,cuda:nccl", "device_id": mine}
    dist.init_process_group(
        store=store, rank=place.rank, world_size=place.world_size, **options
    )
    dist.barrier()
    return store


def leave() -> None:
    """Destroy the process group when all ranks are ready to; do nothing without one."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def report_cause_first(patience: float = 5.0) -> Iterator[None]:
    """Delay the error of a rank that only lost a peer: report the peer's error first.

    When a rank fails, all others lose their connection to it and fail, too. torchrun
    reports the rank that failed in the earliest second; if several did, the lowest one.
    It normally ends the delayed rank by a signal in less than `patience` seconds, so
    only the traceback of the cause is printed.
    """
    try:
        yield
    except Exception as error:
        message = "".join(traceback.format_exception_only(error))
        if RankReport(rank=0, status="raised", error=message).lost_a_peer:
            time.sleep(patience)
        raise
