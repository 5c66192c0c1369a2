"""Where shards live: beside the computation, or in the memory of the CPU.

With shards, their gradients and the optimizer's states on the CPU, a GPU keeps no more
than what is gathered at the moment, and activations. Every gather then begins with a
copy to the GPU of this rank's 1/N, every reduce-scatter ends with one back, and the
CPU does the optimizer's step. Ren et al. 2021, "ZeRO-Offload", section 4. Chapter 08.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ddp_course.measure import label


class Way(Protocol):
    """What makes memory for shards (`gather`)."""

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return uninitialised memory."""


class Home:
    """Shards live where they are computed with."""

    def empty(
        self, way: Way, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for a shard whose parameters are computed with on `device`."""
        return way.empty(numel, dtype, device)

    def add_gradient(self, shard: Tensor, mean: Tensor) -> None:
        """Add a mean gradient to the shard's; its own memory will be used otherwise."""
        if shard.grad is None:
            shard.grad = label(mean.to(shard.dtype, copy=True), "gradients")
        else:
            shard.grad.add_(mean)

    def settle(self) -> None:
        """Return when all gradients have arrived."""


class OnCPU(Home):
    """Shards live on the CPU; parameters are computed with on a GPU.

    Their memory is pinned: the system may not move it, so a GPU copies from and to it
    by itself, while the CPU goes on (`non_blocking=True`). `settle` waits for the last
    copy; before, the numbers of a gradient may not have arrived. The copies take their
    turn in the stream that computes: they are not hidden behind computation.
    """

    def __init__(self, pin: bool = True) -> None:
        self.pin = pin
        self.devices: set[torch.device] = set()

    def empty(
        self, way: Way, numel: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return pinned memory on the CPU."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self.pin)

    def add_gradient(self, shard: Tensor, mean: Tensor) -> None:
        """Copy the mean to the CPU; add it there, if a gradient is there already."""
        self.devices.add(mean.device)
        if shard.grad is None:
            home = torch.empty_like(shard, pin_memory=self.pin)
            shard.grad = label(home.copy_(mean, non_blocking=True), "gradients")
        else:
            shard.grad.add_(mean.to("cpu"))

    def settle(self) -> None:
        """Return when all gradients have arrived."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self.devices.clear()
