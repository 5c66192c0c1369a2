"""Shards with labels for meters; and shards in the memory of the CPU.

With shards, their gradients and the optimizer's states on the CPU, a GPU keeps no more
than what is gathered at the moment, and activations. Every gather then begins with a
copy to the GPU of this rank's 1/N, every reduce-scatter ends with one back, and the
CPU does the optimizer's step. Ren et al. 2021, "ZeRO-Offload", section 4. Chapter 08.
"""

from typing import Any

import torch
from torch import Tensor

from ddp_course.measure.storages import label
from ddp_course.zero.unit_storage import FlatStorage


class LabelledStorage(FlatStorage):
    """A FlatStorage of whose memory meters know the kind (`measure.resident`)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        label(self.shard, "parameters")
        for flat in (self.whole, self.sum):
            label(flat, "communication buffers")

    def keep(self, gradient: Tensor) -> None:
        """Make the parts of `gradient` the pieces' own."""
        super().keep(label(gradient, "gradients"))


class OffloadedStorage(LabelledStorage):
    """Its shard lives on the CPU; its parameters are computed with on a GPU.

    The memory is pinned: the system may not move it, so a GPU copies from and to it by
    itself, while the CPU goes on (`non_blocking=True`). `settle` waits for the last
    copy; before, the numbers of a gradient may not have arrived. The copies take their
    turn in the stream that computes: they are not hidden behind computation.
    """

    PIN = True

    def empty(self, numel: int, like: Tensor) -> Tensor:
        """Allocate pinned memory on the CPU."""
        return torch.empty(numel, dtype=like.dtype, device="cpu", pin_memory=self.PIN)

    def add_gradient(self, mean: Tensor) -> None:
        """Copy the mean to the CPU; add it there, if a gradient is there already."""
        if any(piece.grad is not None for piece in self.pieces.values()):
            super().add_gradient(mean.to("cpu"))
        else:
            home = self.empty(mean.numel(), self.shard)
            self.keep(home.copy_(mean, non_blocking=True))


class Offload:
    """A part that waits for gradients on their way to the CPU."""

    def after_backward(self, fsdp: Any) -> None:
        """Return when all gradients have arrived."""
        settle()


def settle() -> None:
    """Return when all gradients have arrived."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
