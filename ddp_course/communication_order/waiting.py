"""Layers that sleep for stated times instead of computing, and send real bytes.

Sleeping takes no core, so four ranks on two cores "compute" at the same time, and a
recorded step can be compared with the simulated one. Chapter 15.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class SleepingStack(nn.Sequential):
    """A stack of layers: (seconds forward, seconds backward, bytes of parameters) each.

    The input is any tensor that requires no gradient, the output a scalar.
    """

    def __init__(self, layers: Sequence[tuple[float, float, int]]) -> None:
        super().__init__(*(SleepingBlock(*layer) for layer in layers))


class SleepingBlock(nn.Module):
    """A layer that sleeps, and adds its float32 weight's mean to its input's sum."""

    def __init__(self, forward: float, backward: float, nbytes: int) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.zeros(nbytes // 4))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and add."""
        return _Sleep.apply(x.sum() + self.weight.mean(), *self.seconds)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None
