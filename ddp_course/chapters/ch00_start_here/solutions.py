"""Solutions of the exercises of chapter 00."""

import torch.distributed as dist
from torch import Tensor


def my_slice(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """Return this rank's rows: the ranks share the batch equally and in order."""
    rows = len(batch) // world_size
    return batch[rank * rows : (rank + 1) * rows]


def my_average(tensor: Tensor) -> None:
    """Replace `tensor` with its mean over all ranks."""
    dist.all_reduce(tensor)
    tensor /= dist.get_world_size()
