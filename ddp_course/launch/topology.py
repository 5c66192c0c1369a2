"""Nodes, processes, and the three numbers that name a rank.

A *node* is a machine. Every node runs `nproc_per_node` processes, and each process is
one *rank*. A rank has a number in the whole job (`rank`) and a number on its node
(`local_rank`), and its node has a number, too (`node_rank`):

    rank = node_rank * nproc_per_node + local_rank

Everything here is data and arithmetic: nothing is started. Chapter 01.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral

import torch
import torch.distributed as dist

OTHER_LAUNCHERS = (  # torchrun's variables -> those of another launcher
    {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",  # set by srun, not in a batch script
        "LOCAL_RANK": "SLURM_LOCALID",
        "GROUP_RANK": "SLURM_NODEID",
        "GROUP_WORLD_SIZE": "SLURM_STEP_NUM_NODES",
    },
    {
        "RANK": "OMPI_COMM_WORLD_RANK",  # Open MPI
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    {
        "RANK": "PMI_RANK",  # MPICH, Intel MPI
        "WORLD_SIZE": "PMI_SIZE",
        "LOCAL_RANK": "MPI_LOCALRANKID",
        "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
    },
)


@dataclass(frozen=True)
class Topology:
    """The shape of a cluster: `nnodes` machines with `nproc_per_node` ranks each."""

    nnodes: int = 1
    nproc_per_node: int = 4

    def __post_init__(self) -> None:
        """Raise ValueError for a number of machines or ranks that cannot be."""
        for name, number in vars(self).items():
            if not isinstance(number, Integral) or number < 1:
                must = "it must be a whole number, 1 or more"
                raise ValueError(f"{name} is {number!r}; {must}")

    @property
    def world_size(self) -> int:
        """The number of ranks in the whole job."""
        return self.nnodes * self.nproc_per_node

    def place(self, rank: int) -> Place:
        """Return the place of `rank` in this cluster.

        Raises ValueError unless `rank` is from 0 to world_size - 1.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"rank is {rank}; in {self} it can be 0 to {self.world_size - 1}"
            )
        node_rank, local_rank = divmod(rank, self.nproc_per_node)
        return Place(rank, local_rank, node_rank, self)

    def places(self) -> list[Place]:
        """Return the places of all ranks, in rank order."""
        return [self.place(rank) for rank in range(self.world_size)]

    def __str__(self) -> str:
        return f"{self.nnodes} x {self.nproc_per_node} ranks"


@dataclass(frozen=True)
class Place:
    """One rank's numbers: in the job, on its node, and the number of its node."""

    rank: int
    local_rank: int
    node_rank: int
    topology: Topology

    @property
    def world_size(self) -> int:
        """The number of ranks in the whole job."""
        return self.topology.world_size

    def same_node(self, peer: int) -> bool:
        """Return whether rank `peer` runs on this rank's node."""
        return self.topology.place(peer).node_rank == self.node_rank

    def environment(self) -> dict[str, str]:
        """Return the environment variables that torchrun would set for this rank.

        See `torch/distributed/run.py`, "Environment Variables". torchrun calls the node
        rank GROUP_RANK, since a node's processes form a group.
        """
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.topology.nproc_per_node),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.topology.nnodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
        }


def here(environ: Mapping[str, str] = os.environ) -> Place:
    """Return the place of the calling process, read from its environment.

    Works in a rank of `spawn`, torchrun, SLURM's srun and MPI. A process that none of
    them started has its rank in the default process group, on a single node; without a
    process group it is rank 0 of a world of one. Raises ValueError if the nodes run
    different numbers of ranks.
    """
    variables = launcher_variables(environ)
    rank, world_size = (
        int(variables.get("RANK", 0)),
        int(variables.get("WORLD_SIZE", 1)),
    )
    if environ is os.environ and dist.is_initialized():
        in_group = dist.get_rank(), dist.get_world_size()
        if (rank, world_size) != in_group:  # the variables belong to another job
            variables, (rank, world_size) = {}, in_group
    per_node = int(variables.get("LOCAL_WORLD_SIZE", 0))
    nnodes = int(
        variables.get("GROUP_WORLD_SIZE", world_size // (per_node or world_size))
    )
    per_node = per_node or world_size // nnodes
    if nnodes * per_node != world_size:
        raise ValueError(
            f"WORLD_SIZE is {world_size}, but there are {nnodes} nodes and {per_node} "
            f"ranks on this one: every node must run the same number of ranks"
        )
    local_rank = int(variables.get("LOCAL_RANK", rank % per_node))
    node_rank = int(variables.get("GROUP_RANK", rank // per_node))
    return Place(rank, local_rank, node_rank, Topology(nnodes, per_node))


def device(environ: Mapping[str, str] = os.environ) -> torch.device:
    """Return the device of the calling process: its own GPU, or the CPU.

    In a rank of `spawn` it is the launcher's choice. Elsewhere it is `cuda:LOCAL_RANK`
    if this process sees a GPU for each rank of its node, else the CPU; the environment
    variable DDP_COURSE_DEVICE overrides both. SLURM and MPI can hide the GPUs of other
    ranks; a rank that they started warns if it computes on the CPU beside a GPU.
    """
    chosen = environ.get("DDP_COURSE_DEVICE")
    if chosen is not None:
        return torch.device(chosen)
    place, visible = here(environ), torch.cuda.device_count()
    ranks = place.topology.nproc_per_node
    if ranks <= visible:
        return torch.device("cuda", place.local_rank)
    if visible and launcher_variables(environ) is not environ:
        warnings.warn(
            f"rank {place.rank} computes on the CPU: this node has {ranks} ranks, and "
            f"it sees {visible} GPU(s). If the launcher shows each rank a GPU of its "
            f"own, set DDP_COURSE_DEVICE=cuda:0",
            stacklevel=2,
        )
    return torch.device("cpu")


def launcher_variables(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the launcher's variables (rank, world size) under torchrun's names."""
    for names in OTHER_LAUNCHERS if "RANK" not in environ else ():
        if {names["RANK"], names["WORLD_SIZE"]} <= environ.keys():
            return {n: environ[name] for n, name in names.items() if name in environ}
    return environ
