"""Right answers to the exercises of chapter 03, in other styles than the solutions."""

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

from ddp_course import collectives


def ring_in_batches(chunks):
    rank, n = dist.get_rank(), dist.get_world_size()
    passing_by = chunks[(rank - 1) % n]
    for k in range(n - 1):
        arrived = torch.empty_like(chunks[(rank - 2 - k) % n])
        batch = [
            P2POp(dist.isend, passing_by, (rank + 1) % n),
            P2POp(dist.irecv, arrived, (rank - 1) % n),
        ]
        for handle in batch_isend_irecv(batch):
            handle.wait()
        passing_by = arrived + chunks[(rank - 2 - k) % n]
    return passing_by


def ring_with_receives_posted_ahead(chunks):
    rank, n = dist.get_rank(), dist.get_world_size()
    order = [chunks[(rank - 1 - k) % n] for k in range(n)]
    arrived = [torch.empty_like(chunk) for chunk in order[1:]]
    receiving = [irecv(chunk, (rank - 1) % n) for chunk in arrived]
    total, sending = order[0], []
    for own, chunk, handle in zip(order[1:], arrived, receiving, strict=True):
        sending.append(isend(total, (rank + 1) % n))
        handle.wait()
        total = chunk.add_(own)
    for handle in sending:
        handle.wait()
    return total


def all_inside_and_a_shard_between(tensor, node, peers):
    """Inside the node, all-reduce everything; among the peers, a shard each."""
    collectives.all_reduce(tensor, group=node)
    shard = tensor.flatten().chunk(dist.get_world_size(node))[dist.get_rank(node)]
    shard = shard.clone()
    collectives.all_reduce(shard, group=peers)
    collectives.all_gather_single(tensor, shard, group=node)


RIGHT = {
    "ring_reduce_scatter": [ring_in_batches, ring_with_receives_posted_ahead],
    "hierarchical_sum": [all_inside_and_a_shard_between],
}
