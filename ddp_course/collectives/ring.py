"""All-reduce around a ring: send to the right neighbour, add what comes from the left.

A reduce-scatter, then an all-gather (Patarasuk and Yuan 2009; made popular for deep
learning by Gibiansky 2017). Each rank sends 2 (N - 1) / N S bytes, the least that an
all-reduce can send. The price is the number of steps, 2 (N - 1). Explained in chapter
03.

`around_the_ring` is the whole algorithm, over send and receive (`endpoint`).
`by_plan.ring_all_reduce` sends the same messages, as a plan: it first compares the
ranks' calls, cuts long messages into pieces, and can run while the rank computes.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.endpoint import Endpoint


def around_the_ring(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up all ranks' `tensor` (any shape and type), in place; called by all ranks.

    The tensor is cut into one chunk per rank, as equal as possible.
    """
    endpoint = Endpoint(group)
    flat = tensor.contiguous().view(-1)  # a copy, if there are gaps in the memory
    edges = [r * flat.numel() // endpoint.size for r in range(1, endpoint.size)]
    chunks = flat.tensor_split(edges)
    reduce_scatter(chunks, endpoint)
    all_gather(chunks, endpoint)
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))


def reduce_scatter(chunks: Sequence[Tensor], endpoint: Endpoint) -> None:
    """Add up, so that chunk r of rank r becomes the sum of all ranks' chunks r.

    In step k rank r sends chunk r - 1 - k, and adds to chunk r - 2 - k, which it sends
    in the next step. N - 1 steps; the other chunks are left with partial sums.
    """
    rank, n = endpoint.rank, endpoint.size
    for step in range(n - 1):
        outgoing = chunks[(rank - 1 - step) % n]
        own = chunks[(rank - 2 - step) % n]
        arrived = torch.empty_like(own)
        right_and_left(outgoing, arrived, endpoint)
        own += arrived


def all_gather(chunks: Sequence[Tensor], endpoint: Endpoint) -> None:
    """Send chunk r of rank r to all ranks, for every r.

    In step k rank r sends chunk r - k, and receives chunk r - 1 - k, which it sends in
    the next step. N - 1 steps.
    """
    rank, n = endpoint.rank, endpoint.size
    for step in range(n - 1):
        outgoing, incoming = chunks[(rank - step) % n], chunks[(rank - 1 - step) % n]
        right_and_left(outgoing, incoming, endpoint)


def right_and_left(outgoing: Tensor, incoming: Tensor, endpoint: Endpoint) -> None:
    """Send to the right neighbour, and receive from the left one, at the same time."""
    right = (endpoint.rank + 1) % endpoint.size
    left = (endpoint.rank - 1) % endpoint.size
    endpoint.exchange([(outgoing, right)], [(incoming, left)])
