"""A part of `PipelineParallel`: backward in two halves, I and W.

I computes what another stage waits for, W what nobody waits for before the optimizer.

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

from ddp_course.mechanisms.weight_gradients import Task, WeightGradStore
from ddp_course.pipeline.runtime import Runtime
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
        if any(map(_has_hooks, ctx.parameters)):  # it is called once, now
            return of_x, *of_parameters(), None
        return of_x, *ctx.store.compute(ctx.parameters, of_parameters), None


def _has_hooks(parameter: Tensor | None) -> bool:
    """Whether a hook waits for this gradient; ours know that it may come later."""
    hooks = getattr(parameter, "_backward_hooks", None) or {}
    return any(
        not getattr(hook, "__module__", "").startswith("ddp_course.")
        for hook in hooks.values()
    )


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


class SplitBackward:
    """Teaches a runtime the operations I and W."""

    def __init__(self, module: nn.Module) -> None:
        self.store = WeightGradStore()
        split_backward(module, self.store)

    def before_run(self, runtime: Runtime) -> None:
        """Add the two operations."""
        halves = Halves(runtime, self.store)
        runtime.operations |= {"I": halves.inputs, "W": halves.weights}


class Halves:
    """The two halves of the backwards of one run."""

    def __init__(self, runtime: Runtime, store: WeightGradStore) -> None:
        self.runtime, self.store = runtime, store
        self.tasks: dict[tuple[int, int], list[Task]] = {}  # from I to W

    def inputs(
        self, stage: int, microbatch: int, gradient: Tensor | None
    ) -> Tensor | None:
        """I: go backward, but leave the weights' gradients for later."""
        with self.store.collect() as self.tasks[stage, microbatch]:
            return self.runtime.backward(stage, microbatch, gradient)

    def weights(self, stage: int, microbatch: int, _: None) -> None:
        """W: compute the gradients that I has left, and free what each one needed."""
        tasks = self.tasks.pop((stage, microbatch))
        while tasks:
            tasks.pop()()
