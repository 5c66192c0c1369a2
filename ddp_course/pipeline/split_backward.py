"""Backward in two halves: first what somebody waits for, then what nobody waits for.

The backward of y = x Wᵀ + b, with G the gradient of y, has three products:

    gradient of x    G W         the stage before cannot go on without it
    gradient of W    Gᵀ x        needed when the optimizer steps
    gradient of b    sum of G    likewise

Autograd computes them one after the other. `SplitLinear` computes the first, and leaves
the others for later if it is told to; until then x and G are kept. In a transformer the
linear layers are nearly all of the weights' half; LayerNorm and embeddings stay where
they are, in the first half. The sums are the same, so the gradients are, too.

Qi et al. 2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2. PyTorch
walks through autograd's graph instead, and cuts it where the paths to inputs and to
weights part (torch/distributed/pipelining, _backward.py). Chapter 11.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddp_course.mechanisms.weight_gradients import WeightGradStore
from ddp_course.precision.autocast import autocast_dtype


class SplitLinear(torch.autograd.Function):
    """`F.linear`, whose weights' gradients can be put off."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradStore
    ) -> Tensor:
        """Return x Wᵀ + b: (..., in) -> (..., out)."""
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.store = (weight, bias), store
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of x, and those of W and b or, put off, None."""
        x, weight = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad[:3]
        of_x = gradient @ weight if needs_x else None  # (..., in)
        of_parameters = partial(_of_parameters, x, gradient, needed)
        if not any(needed):
            return of_x, None, None, None
        return of_x, *ctx.store.compute(ctx.parameters, of_parameters), None


def _of_parameters(
    x: Tensor, gradient: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of W (out, in) and b (out,), those that are needed."""
    rows = gradient.reshape(-1, gradient.shape[-1])  # (N, out)
    return [
        rows.t() @ x.reshape(-1, x.shape[-1]) if needed[0] else None,  # (out, in)
        rows.sum(0) if needed[1] else None,  # (out,)
    ]


def split_backward(module: nn.Module, store: WeightGradStore) -> None:
    """Let the linear layers of a module put their weights' gradients off.

    Changes what their `forward` does, for the instances. A layer of another kind that
    can do so, too, has an attribute `weight_grads`, which is set; one that has not
    computes its weights' gradients together with its input's.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(_forward, layer, store)
        elif hasattr(layer, "weight_grads"):
            layer.weight_grads = store


def _forward(layer: nn.Linear, store: WeightGradStore, x: Tensor) -> Tensor:
    if autocast_dtype(x.device.type):
        raise RuntimeError(
            "backward in two halves (I and W) cannot be used with autocast; take a "
            "schedule with B, or a model whose layers are in the lower precision"
        )
    return SplitLinear.apply(x, layer.weight, layer.bias, store)
