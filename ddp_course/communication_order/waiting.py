"""Layers that wait in place of computing, for stated times; sent are real bytes.

Waiting takes no core, so four ranks on two cores compute at the same time, and what is
recorded can be laid beside what was simulated. Chapter 15.
"""

from __future__ import annotations

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
        return _Wait.apply(x.sum(), self.weight, self.seconds)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, seconds: tuple[float, float]
    ) -> Tensor:
        forward, ctx.backward_seconds = seconds
        ctx.numel = weight.numel()
        time.sleep(forward)
        return x + weight.mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.backward_seconds)
        return gradient, (gradient / ctx.numel).expand(ctx.numel), None
