"""All-reduce along a tree: reduce up, broadcast down, half as many ranks at each level.

It takes 2 log2(N) steps instead of 2 (N - 1), but each message is a whole tensor, and
some ranks send log2(N) of them, others one. Good for small tensors.
`by_plan.tree_all_reduce` sends the same messages and checks the call first. Explained
in chapter 03.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives.endpoint import Endpoint


def along_a_tree(tensor: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Add up all ranks' `tensor` (contiguous), in place; called by all ranks."""
    endpoint = Endpoint(group)
    rank, n = endpoint.rank, endpoint.size
    distances = [2**level for level in range((n - 1).bit_length())]
    arrived = torch.empty_like(tensor)
    for distance in distances:  # up: 1, 2, 4, ...
        if rank % (2 * distance) == distance:
            endpoint.send(tensor, rank - distance).wait()
        elif rank % (2 * distance) == 0 and rank + distance < n:
            endpoint.receive(arrived, rank + distance).wait()
            tensor += arrived
    for distance in reversed(distances):  # and down again
        if rank % (2 * distance) == distance:
            endpoint.receive(tensor, rank - distance).wait()
        elif rank % (2 * distance) == 0 and rank + distance < n:
            endpoint.send(tensor, rank + distance).wait()
