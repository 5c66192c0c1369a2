"""Right answers to the exercises of chapter 02, in other styles than the solutions."""

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv, irecv, isend


def swap_in_a_batch(tensor, peer):
    got = torch.empty_like(tensor)
    for handle in batch_isend_irecv(
        [P2POp(isend, tensor, peer), P2POp(dist.irecv, got, peer)]
    ):
        handle.wait()
    return got


def swap_with_handles(tensor, peer):
    got = torch.empty_like(tensor)
    receiving, sending = irecv(got, peer), isend(tensor, peer)
    receiving.wait()
    sending.wait()
    return got


def all_gather_in_a_batch(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    got = [torch.empty_like(tensor) for _ in range(n)]
    got[rank].copy_(tensor)
    others = [other for other in range(n) if other != rank]
    batch = [P2POp(dist.isend, tensor, other) for other in others]
    batch += [P2POp(dist.irecv, got[other], other) for other in others]
    for handle in dist.batch_isend_irecv(batch) if batch else ():
        handle.wait()
    return got


def all_gather_around_a_ring(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    got = [tensor.clone() for _ in range(n)]
    for k in range(n - 1):
        sending = isend(got[(rank - k) % n], (rank + 1) % n)
        dist.recv(got[(rank - k - 1) % n], (rank - 1) % n)
        sending.wait()
    return got


def broadcast_from_whoever_comes(tensor):
    """Who serves a rank is not its business; all messages are started at once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.recv(tensor)
    distance = (rank & -rank) if rank else 1 << n.bit_length()
    handles = []
    while distance > 1:
        distance //= 2
        if rank + distance < n:
            handles.append(dist.isend(tensor, rank + distance))
    for handle in handles:
        handle.wait()


RIGHT = {
    "swap": [swap_in_a_batch, swap_with_handles],
    "my_all_gather": [all_gather_in_a_batch, all_gather_around_a_ring],
    "my_broadcast": [broadcast_from_whoever_comes],
}
