"""Two compressors in a few lines each, for one tensor on every rank.

They store nothing from step to step; the caller passes PowerSGD's Q on. `feedback` adds
error feedback. Chapter 14.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def mean_in_16_bits(gradient: Tensor) -> Tensor:
    """Return the mean over the ranks, sent and added as float16: half the bytes."""
    small = gradient.half() / dist.get_world_size()  # before adding: no overflow
    dist.all_reduce(small)
    return small.to(gradient.dtype)


def mean_in_low_rank(matrix: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return approximately the mean over the ranks of a matrix (n, m), and the next Q.

    The ranks send two thin matrices: P (n, r) and Q (m, r). Begin with any Q that is
    the same on all ranks, and pass the returned Q, which approximates the matrix's main
    directions, to the next call.
    """
    p = matrix @ q  # linear in the matrix, so the products can be summed
    dist.all_reduce(p)
    p = torch.linalg.qr(p).Q  # orthonormal columns, equal on all ranks
    q = matrix.T @ p
    dist.all_reduce(q)
    q /= dist.get_world_size()
    return p @ q.T, q
