"""How much of a pipeline's time was idle, and how to measure that on few cores.

Ranks that share cores slow each other down. `virtual_time` has a clock for this case.
Or let the ranks not compute at all: layers that sleep (`Waiting`) take no core,
and four ranks on two cores behave as four machines would. Chapter 10.
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

    A step lasts from the first start to the last end of F, B, I and W on any rank; idle
    is what a rank does not spend on them, be it waiting for messages or handing them
    over. As `simulate` defines it. Raises ValueError if there are no such events.
    """
    steps: dict[int, list[Event]] = {}
    for event in events:
        if event.lane == COMPUTE:
            steps.setdefault(event.detail["step"], []).append(event)
    if not steps:
        none = f"there are no events of the lane {COMPUTE!r}"
        raise ValueError(f"{none}: was a log open?")
    spans = [max(e.end for e in s) - min(e.start for e in s) for s in steps.values()]
    computed = [event for step in steps.values() for event in step]
    ranks, busy = {e.rank for e in computed}, sum(e.seconds for e in computed)
    return 1 - busy / (len(ranks) * sum(spans))


class Waiting(nn.Module):
    """A layer that returns its input times a weight (of 1), after some time.

    Args:
        F, I, W: seconds of forward and of the two halves of backward.

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
        """Wait, and return x times the weight."""
        return _Wait.apply(x, self.weight, self.seconds, self.weight_grads)


class _Wait(torch.autograd.Function):
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

        def of_weight() -> list[Tensor]:
            time.sleep(for_weight)
            return [(gradient * x).sum()]

        time.sleep(for_input)
        of_parameters = ctx.store.compute((ctx.parameter,), of_weight)
        return gradient * weight, *of_parameters, None, None
