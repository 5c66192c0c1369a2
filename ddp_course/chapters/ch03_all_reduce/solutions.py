"""Solutions of the exercises of chapter 03."""

import torch
import torch.distributed as dist

from ddp_course.collectives import all_gather_single, all_reduce, reduce_scatter_single
from ddp_course.collectives.plan import Transfer


def ring_transfers(world_size: int) -> list[Transfer]:
    """Return the transfers of a ring: the first N - 1 steps add, the others copy.

    It is N - 1, not N / 2, although both are 1 for two ranks.
    """
    transfers = []
    for step in range(2 * (world_size - 1)):
        for rank in range(world_size):
            right, chunk = (rank + 1) % world_size, (rank - 1 - step) % world_size
            adds = step < world_size - 1
            transfers.append(Transfer(step, rank, right, chunk, chunk + 1, adds))
    return transfers


def ring_reduce_scatter(chunks: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of `chunks[rank]`; each rank adds its numbers to passing sums."""
    rank, n = dist.get_rank(), dist.get_world_size()
    passing_by = chunks[(rank - 1) % n]
    for k in range(n - 1):
        sending = dist.isend(passing_by, (rank + 1) % n)
        arrived = torch.empty_like(chunks[(rank - 2 - k) % n])
        dist.recv(arrived, (rank - 1) % n)
        sending.wait()
        passing_by = arrived + chunks[(rank - 2 - k) % n]
    return passing_by


def hierarchical_sum(
    tensor: torch.Tensor, node: dist.ProcessGroup, peers: dist.ProcessGroup
) -> None:
    """Add up `tensor` over all ranks; each rank sends only a shard to other nodes."""
    shard = tensor.new_empty(tensor.numel() // dist.get_world_size(node))
    reduce_scatter_single(shard, tensor, group=node)
    all_reduce(shard, group=peers)
    all_gather_single(tensor, shard, group=node)
