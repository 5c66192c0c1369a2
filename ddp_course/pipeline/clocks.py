"""Measure the bubble of a pipeline, the idle share of its time, even on few cores.

Ranks that share cores slow each other down. `virtual_time` has a clock for this case.
Another way is layers that sleep instead of computing (`SleepingLayer`): they need no
core, so four ranks on two cores behave as four machines would. Chapter 10.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.measure import Event
from ddp_course.pipeline.backward import WeightGradStore
from ddp_course.pipeline.recorded import COMPUTE
from ddp_course.theory.checks import check_not_negative


def bubble(events: Iterable[Event]) -> float:
    """Return the idle share of all ranks' time, from their events in one or more steps.

    A step lasts from the first start to the last end of F, B, I and W on any rank. A
    rank is idle while it computes none of these: it sends messages or waits for them.
    `simulate_schedule` has the same definition. Raises ValueError if there are no such
    events.
    """
    steps: dict[int, list[Event]] = {}
    for event in events:
        if event.lane == COMPUTE:
            steps.setdefault(event.detail["step"], []).append(event)
    if not steps:
        raise ValueError(
            f"there are no events of the lane {COMPUTE!r}; open an event log, and pass "
            "a recorder to the pipeline"
        )
    spans = [max(e.end for e in s) - min(e.start for e in s) for s in steps.values()]
    computed = [event for step in steps.values() for event in step]
    ranks, busy = {e.rank for e in computed}, sum(e.seconds for e in computed)
    return 1 - busy / (len(ranks) * sum(spans))


class SleepingLayer(nn.Module):
    """A layer that sleeps, and returns its input times a weight of 1.

    Args:
        F, I, W: seconds to sleep in forward and in the two halves of backward.

    Raises ValueError for a time below 0.
    """

    def __init__(self, F: float = 0.03, I: float = 0.03, W: float = 0.03) -> None:  # noqa: E741
        super().__init__()
        for name, seconds in (("F", F), ("I", I), ("W", W)):
            check_not_negative(name, seconds)
        self.seconds = F, I, W
        self.weight = nn.Parameter(torch.ones(()))
        self.weight_grads = WeightGradStore()

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and return x times the weight."""
        return _Sleep.apply(x, self.weight, self.seconds, self.weight_grads)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        seconds: tuple[float, float, float],
        store: WeightGradStore,
    ) -> Tensor:
        forward, *ctx.backward_seconds = seconds
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.store = weight, store
        time.sleep(forward)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_input, for_weight = ctx.backward_seconds

        def compute() -> list[Tensor]:
            time.sleep(for_weight)
            return [(gradient * x).sum()]

        time.sleep(for_input)
        grad_weight = ctx.store.compute((ctx.parameter,), compute)
        return gradient * weight, *grad_weight, None, None
