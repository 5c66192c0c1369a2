"""Backward in two halves: first what somebody waits for, then what nobody waits for.

The backward of y = x Wᵀ + b, with G the gradient of y, has three products:

    gradient of x    G W         the stage before cannot go on without it
    gradient of W    Gᵀ x        needed when the optimizer steps
    gradient of b    sum of G    likewise

Autograd computes them one after the other. `SplitLinear` computes the first, and leaves
the others for later if it is told to; until then x and G are kept. In a transformer the
linear layers are nearly all of the weights' half; LayerNorm and embeddings stay where
they are, in the first half. The sums are the same, so the gradients are, too.

Qi et al. 2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2, and the
WeightGradStore of its code. PyTorch walks through autograd's graph instead, and cuts it
where the paths to inputs and to weights part (torch/distributed/pipelining,
_backward.py). Chapter 11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Task = Callable[[], None]


class Later:
    """Where layers leave what can be done later: now, or put off until it is called.

    with later.put_off() as tasks:
        loss.backward()        # the gradients of the inputs
    for task in tasks:
        task()                 # those of the weights
    """

    def __init__(self) -> None:
        self.tasks: list[Task] | None = None

    @contextmanager
    def put_off(self) -> Iterator[list[Task]]:
        """Within this block, collect tasks in the list that it is given."""
        self.tasks = tasks = []
        try:
            yield tasks
        finally:
            self.tasks = None


class SplitLinear(torch.autograd.Function):
    """`F.linear`, whose weights' gradients can be put off."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: Later
    ) -> Tensor:
        """Return x Wᵀ + b: (..., in) -> (..., out)."""
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.later = (weight, bias), later
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, and those of W and b or, put off, None."""
        x, weight = ctx.saved_tensors
        _, *needed = ctx.needs_input_grad[:3]
        of_x = gradient @ weight if ctx.needs_input_grad[0] else None  # (..., in)
        of_parameters = partial(_of_parameters, x, gradient, needed)
        tasks = ctx.later.tasks
        if tasks is None:
            return of_x, *of_parameters(), None
        if any(needed):
            tasks.append(partial(_accumulate, ctx.parameters, of_parameters))
        return of_x, None, None, None


def _of_parameters(
    x: Tensor, gradient: Tensor, needed: list[bool]
) -> list[Tensor | None]:
    """Return the gradients of W (out, in) and b (out,), those that are needed."""
    rows = gradient.reshape(-1, gradient.shape[-1])  # (N, out)
    return [
        rows.t() @ x.reshape(-1, x.shape[-1]) if needed[0] else None,  # (out, in)
        rows.sum(0) if needed[1] else None,  # (out,)
    ]


def _accumulate(
    parameters: tuple[Tensor, Tensor | None],
    gradients: Callable[[], list[Tensor | None]],
) -> None:
    """Add gradients to what the parameters have; nobody's hooks are called."""
    for parameter, gradient in zip(parameters, gradients(), strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient


def split_backward(module: nn.Module, later: Later) -> None:
    """Let the linear layers of a module put their weights' gradients off.

    Changes what their `forward` does, for the instances. A layer of another kind that
    can do so, too, has an attribute `later`, which is set (`waiting.Waiting` does).
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(_forward, layer, later)
        elif hasattr(layer, "later"):
            layer.later = later


def _forward(layer: nn.Linear, later: Later, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        raise RuntimeError(
            "backward in two halves (I and W) cannot be used with autocast; take a "
            "schedule with B, or a model whose layers are in the lower precision"
        )
    return SplitLinear.apply(x, layer.weight, layer.bias, later)
