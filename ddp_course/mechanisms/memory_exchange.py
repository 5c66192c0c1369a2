"""Buckets in memory that all ranks of one machine see; on the CPU. Chapter 05."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.collectives import shared_memory


def empty_for_all(group: dist.ProcessGroup | None) -> Callable[..., Tensor]:
    """Return what makes memory that all ranks see, called as `torch.empty`.

    Raises ValueError for another device than the CPU.
    """

    def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type != "cpu":
            told = f"buckets_in_shared_memory is True, but the model is on {device}"
            raise ValueError(f"{told}, not cpu")
        return shared_memory.empty(numel, dtype=dtype, group=group)

    return empty
