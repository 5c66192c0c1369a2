"""Layers that wait instead of computing: so that a few cores can play many ranks.

Four ranks on two cores do not compute at the same time, so their pipeline's idle share
says nothing. Waiting takes no core: with layers that sleep for as long as they are told
to, four ranks behave as four machines would, and what the schedule leaves idle can be
measured. Chapter 10.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.pipeline.split_backward import Later


class Waiting(nn.Module):
    """A layer that returns its input times a weight (of 1), after some time.

    Args:
        F, I, W: seconds of forward and of the two halves of backward.

    Raises ValueError for a time below 0.
    """

    def __init__(self, F: float = 0.03, I: float = 0.03, W: float = 0.03) -> None:  # noqa: E741
        super().__init__()
        for name, seconds in (("F", F), ("I", I), ("W", W)):
            if not seconds >= 0:
                raise ValueError(f"{name} is {seconds!r}; it must be 0 or more seconds")
        self.seconds = F, I, W
        self.weight = nn.Parameter(torch.ones(()))
        self.later = Later()

    def forward(self, x: Tensor) -> Tensor:
        """Wait, and return x times the weight."""
        return _Wait.apply(x, self.weight, self.seconds, self.later)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        seconds: tuple[float, float, float],
        later: Later,
    ) -> Tensor:
        forward, *ctx.backward_seconds = seconds
        ctx.save_for_backward(x, weight)
        ctx.later = later
        time.sleep(forward)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_input, for_weight = ctx.backward_seconds
        time.sleep(for_input)
        wait = partial(time.sleep, for_weight)
        if ctx.later.tasks is None:
            wait()
        else:
            ctx.later.tasks.append(wait)
        return gradient * weight, (gradient * x).sum(), None, None
