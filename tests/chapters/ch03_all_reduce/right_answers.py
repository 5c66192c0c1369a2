"""Right answers to the exercises of chapter 03, in other styles than the solutions."""

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

from ddp_course import collectives
from ddp_course.collectives.plan import Transfer


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


def two_halves(world_size):
    n = world_size
    first = [
        Transfer(k, r, (r + 1) % n, (r - k) % n, (r - k) % n + 1, True)
        for r in range(n)
        for k in range(n - 1)
    ]
    return first + [
        Transfer(n - 1 + t.step, t.src, t.dst, c, c + 1, False)
        for t in first
        for c in [(t.first + 1) % n]
    ]


def by_the_package(world_size):
    return list(collectives.ring.plan(world_size).transfers)


def by_lists_of_pytorch_and_ours(tensor, node, peers):
    """A list of views for the tensor, and the hierarchy's three steps."""
    n = dist.get_world_size(node)
    pieces = list(tensor.view(-1).chunk(n))
    shard = torch.zeros_like(pieces[0])
    collectives.reduce_scatter(shard, pieces, group=node)
    collectives.all_reduce(shard, group=peers)
    collectives.all_gather(pieces, shard, group=node)


RIGHT = {
    "ring_transfers": [two_halves, by_the_package],
    "ring_reduce_scatter": [ring_in_batches, ring_with_receives_posted_ahead],
    "hierarchical_sum": [
        all_inside_and_a_shard_between,
        by_lists_of_pytorch_and_ours,
    ],
}
