"""Who is who: nodes, processes, and the four numbers that name a rank.

A *node* is a machine. On every node run `nproc_per_node` processes, and each process
is one *rank*. A rank has a number in the whole job (`rank`), a number on its node
(`local_rank`), and its node has a number, too (`node_rank`):

    rank = node_rank * nproc_per_node + local_rank

Everything here is plain data and arithmetic: nothing is started. Explained in
chapter 01.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The shape of a cluster: `nnodes` machines with `nproc_per_node` ranks each."""

    nnodes: int = 1
    nproc_per_node: int = 4

    def __post_init__(self) -> None:
        """Refuse a cluster without ranks."""
        if self.nnodes < 1 or self.nproc_per_node < 1:
            raise ValueError(f"a cluster of {self}: both numbers must be 1 or more")

    @property
    def world_size(self) -> int:
        """The number of ranks in the whole job."""
        return self.nnodes * self.nproc_per_node

    def place(self, rank: int) -> Place:
        """Return the place of `rank` (0 to world_size - 1) in this cluster."""
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
    """One rank's names: what it is called in the job, on its node, and its node."""

    rank: int
    local_rank: int
    node_rank: int
    topology: Topology

    @property
    def world_size(self) -> int:
        """The number of ranks in the whole job."""
        return self.topology.world_size

    def same_node(self, peer: int) -> bool:
        """Tell whether rank `peer` runs on this rank's node."""
        return self.topology.place(peer).node_rank == self.node_rank

    def environment(self) -> dict[str, str]:
        """Return the variables by which torchrun tells a process who it is.

        The names are torchrun's (`torch/distributed/run.py`, "Environment Variables").
        torchrun calls the node rank GROUP_RANK, since a node's processes form a group.
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

    Works in a rank of `spawn` and in one of torchrun; a process that was started by
    neither is rank 0 of a world of one.
    """
    rank = int(environ.get("RANK", 0))
    world_size = int(environ.get("WORLD_SIZE", 1))
    per_node = int(environ.get("LOCAL_WORLD_SIZE", world_size))
    nnodes = int(environ.get("GROUP_WORLD_SIZE", world_size // per_node))
    if nnodes * per_node != world_size:
        raise ValueError(
            f"WORLD_SIZE is {world_size}, but there are {nnodes} nodes and {per_node} "
            f"ranks on this one: every node must run as many"
        )
    topology = Topology(nnodes, per_node)
    return Place(
        rank=rank,
        local_rank=int(environ.get("LOCAL_RANK", rank % per_node)),
        node_rank=int(environ.get("GROUP_RANK", rank // per_node)),
        topology=topology,
    )
