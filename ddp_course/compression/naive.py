"""The two ideas of this room, each in a few lines, for one tensor of every rank.

Nothing is remembered from step to step but PowerSGD's Q: error feedback is an idea of
its own (`feedback`). Chapter 14.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def mean_in_16_bits(gradient: Tensor) -> Tensor:
    """Return the mean over the ranks, sent and added as float16: half the bytes."""
    small = gradient.half() / dist.get_world_size()  # divided first: no overflow
    dist.all_reduce(small)
    return small.to(gradient.dtype)


def mean_in_low_rank(matrix: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over the ranks of a matrix (n, m), nearly; and the next Q.

    Two thin matrices travel: P (n, r) and Q (m, r). Begin with any Q that is the same
    on all ranks, and pass on the returned one: it knows the directions of this step.
    """
    p = matrix @ q  # linear in the matrix: the sum of the products is right
    dist.all_reduce(p)
    p = torch.linalg.qr(p).Q  # orthonormal columns, equal on all ranks
    q = matrix.T @ p
    dist.all_reduce(q)
    q /= dist.get_world_size()
    return p @ q.T, q
