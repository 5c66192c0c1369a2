"""Layers that wait in place of computing, for stated times; sent are real bytes.

Waiting takes no core, so four ranks on two cores compute at the same time, and what is
recorded can be laid beside what was simulated. Chapter 15.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Waiting(nn.Sequential):
    """Layers of (seconds forward, seconds backward, bytes of parameters) each.

    Takes any tensor that requires no gradient, and returns a number to go back from.
    """

    def __init__(self, layers: Sequence[tuple[float, float, int]]) -> None:
        super().__init__(*(WaitingLayer(*layer) for layer in layers))


class WaitingLayer(nn.Module):
    """Adds the mean of its float32 weight to what it is given, and takes its time."""

    def __init__(self, forward: float, backward: float, nbytes: int) -> None:
        super().__init__()
        self.seconds = forward, backward
        self.weight = nn.Parameter(torch.zeros(nbytes // 4))

    def forward(self, x: Tensor) -> Tensor:
        """Wait, and add."""
        return _Wait.apply(x.sum() + self.weight.mean(), *self.seconds)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradient, None, None
