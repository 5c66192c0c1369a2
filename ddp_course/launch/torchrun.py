"""A rank's side of torchrun: come to the process group, and leave it in good order.

torchrun has started this process and told it, in environment variables, who it is and
where its store is. `join` does with that what `spawn` does for its ranks.
Explained in chapter 01.
"""

import datetime
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ddp_course.launch.rendezvous import loopback_interface, store_of_torchrun
from ddp_course.launch.reports import RankReport
from ddp_course.launch.topology import device, here


def under_torchrun() -> bool:
    """Tell whether a launcher that says where its ranks meet started this process."""
    told = "RANK" in os.environ or here().world_size > 1
    return told and "MASTER_ADDR" in os.environ


def check_alone() -> None:
    """Raise ValueError if a launcher started this process as one of several.

    SLURM and MPI do not say where ranks meet: each would believe to be the only one.
    """
    place = here()
    if place.world_size > 1 and not dist.is_initialized():
        raise ValueError(
            f"SLURM, MPI or another launcher started this process as rank {place.rank} "
            f"of {place.world_size}, but the ranks have not met. Let it start torchrun "
            f"on each node (see the README), or set MASTER_ADDR and MASTER_PORT, "
            f"where all meet"
        )


def join(
    timeout: datetime.timedelta = datetime.timedelta(minutes=10),
    backend: str | None = None,
) -> dist.Store:
    """Make the default process group and return the store that its ranks share.

    Over NCCL for tensors on GPUs and gloo for others; or over another `backend`, on the
    CPU.
    """
    if backend is not None:
        os.environ["DDP_COURSE_DEVICE"] = "cpu"
    place, mine = here(), device()
    os.environ.update(place.environment())  # SLURM and MPI have other names for it
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
    """End the process group together, unless the function has ended it already."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


@contextmanager
def cause_first(patience: float = 5.0) -> Iterator[None]:
    """Let a rank that only lost a peer wait, so that the peer's own error comes first.

    When a rank fails, all others fail in the next moment, since it is gone; torchrun
    takes for the cause whoever failed in the earliest second, and of several the lowest
    rank. Normally it ends the waiting rank by a signal in less than `patience` seconds,
    and only the culprit's traceback is printed.
    """
    try:
        yield
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        if RankReport(rank=0, status="raised", error=told).lost_a_peer:
            time.sleep(patience)
        raise
