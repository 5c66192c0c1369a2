"""Solutions of the exercises of chapter 01."""

import os

import torch.distributed as dist


def global_rank(node_rank: int, local_rank: int, nproc_per_node: int) -> int:
    """Return the rank: all ranks of earlier nodes, plus the place on this node."""
    return node_rank * nproc_per_node + local_rank


def peer_on_next_node(rank: int, nnodes: int, nproc_per_node: int) -> int:
    """Return the rank one node further; after the last node comes the first."""
    return (rank + nproc_per_node) % (nnodes * nproc_per_node)


def node_group() -> dist.ProcessGroup:
    """Return the group of this node's ranks; all ranks create all groups, in order."""
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    groups = [
        dist.new_group(list(range(first, first + size)))
        for first in range(0, dist.get_world_size(), size)
    ]
    return groups[int(os.environ["GROUP_RANK"])]
