"""Parts of `PipelineParallel` that change how a stage goes backward.

    Recomputed     stores only a stage's input, and runs its forward again before B or I
    SplitBackward  adds the operations I and W: backward in two halves

Another stage waits for the result of I; only the optimizer's step waits for the result
of W. The backward of y = x Wᵀ + b, with G the gradient of y, has three products:

    gradient of x    G W         the previous stage needs it to go on
    gradient of W    Gᵀ x        the optimizer needs it
    gradient of b    sum of G    the optimizer needs it

Autograd computes all three, one after the other. `SplitLinear` computes the first, and
lets a `WeightGradStore` postpone the others; until then x and G are stored. In a
transformer the linear layers are nearly all of W's work; LayerNorm and embeddings
compute all their gradients in I. The gradients equal those of B bit by bit.

Qi et al. 2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2, and the
WeightGradStore of its code. PyTorch walks through autograd's graph instead, and cuts it
where the paths to inputs and to weights part (torch/distributed/pipelining,
_backward.py). Chapter 11.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddp_course.pipeline.runtime import Runtime
from ddp_course.pipeline.schedule import Action

# ---- forward again -------------------------------------------------------------------


class Recomputed:
    """A part that stores only a stage's input, and recomputes before its backward.

    The recomputed forward draws the same random numbers. All microbatches but one then
    need memory for their inputs only, at the cost of one more forward. (`recompute`
    does the same for a block of a model: chapter 06.)
    """

    def __init__(self) -> None:
        # (stage, microbatch) -> input and random state, from F to B or I
        self.inputs: dict[tuple[int, int], tuple[Tensor, Any]] = {}

    def before_run(self, runtime: Runtime) -> None:
        """Replace the runtime's forward operation, if a backward will follow."""
        if torch.is_grad_enabled():
            runtime.operations["F"] = partial(self.forward, runtime)

    def forward(
        self, runtime: Runtime, stage: int, microbatch: int, x: Tensor
    ) -> Tensor | None:
        """Compute F without recording a graph, and store the input."""
        self.inputs[stage, microbatch] = x, random_state(x.device)
        with torch.no_grad():
            return runtime.forward(stage, microbatch, x)

    def before_compute(self, runtime: Runtime, action: Action) -> None:
        """Run the stage's forward again, with a graph, before its B or I."""
        if action.op in ("B", "I"):
            stage, microbatch = action.stage, action.microbatch
            x, state = self.inputs.pop((stage, microbatch))
            with drawn_again(state, x.device):
                runtime.forward(stage, microbatch, x)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the random generators: the CPU's, and the GPU's or None."""
    on_gpu = device.type == "cuda"
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None


@contextmanager
def drawn_again(
    state: tuple[Tensor, Tensor | None], device: torch.device
) -> Iterator[None]:
    """Draw random numbers from `state` inside the block; restore the generators."""
    cpu, gpu = state
    with torch.random.fork_rng(devices=[] if gpu is None else [device]):
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu, device)
        yield


# ---- the weights' gradients later ----------------------------------------------------

Gradients = Sequence[Tensor | None]
Task = Callable[[], None]


class WeightGradStore:
    """A store of postponed tasks: the weights' gradients of layers.

    A layer that can postpone its weights' gradients has an attribute `weight_grads`,
    None or the store that its backward calls:

        grad_weight, grad_bias = store.compute((weight, bias), lambda: ...)

    The result is `[gradient, gradient]`, or `[None, None]` inside of `collect`:

        with store.collect() as tasks:
            loss.backward()        # computes the gradients of the inputs
        for task in tasks:
            task()                 # computes the gradients of the weights
    """

    def __init__(self) -> None:
        self.tasks: list[Task] | None = None  # None outside of `collect`

    @contextmanager
    def collect(self) -> Iterator[list[Task]]:
        """Collect postponed gradients inside the block; yield the list of tasks."""
        self.tasks = tasks = []
        try:
            yield tasks
        finally:
            self.tasks = None

    def compute(
        self, parameters: Gradients, gradients: Callable[[], Gradients]
    ) -> Gradients:
        """Return one gradient per parameter; in `collect`, postpone them, return Nones.

        A layer's backward calls it. A parameter, or its gradient, is None if the layer
        has no such parameter, or needs no such gradient.
        """
        if self.tasks is None:
            return gradients()
        self.tasks.append(partial(_accumulate, parameters, gradients))
        return [None] * len(parameters)


@torch.no_grad()
def _accumulate(parameters: Gradients, gradients: Callable[[], Gradients]) -> None:
    """Add gradients to the parameters' `grad` through autograd, which calls hooks."""
    pairs = zip(parameters, gradients(), strict=True)
    present = [(p, gradient) for p, gradient in pairs if gradient is not None]
    if present:
        torch.autograd.backward(*zip(*present, strict=True))


class SplitLinear(torch.autograd.Function):
    """`F.linear` with a backward that can postpone the weights' gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, store: WeightGradStore
    ) -> Tensor:
        """Return x Wᵀ + b: (..., in) -> (..., out)."""
        ctx.save_for_backward(x, weight)
        ctx.parameters, ctx.store = (weight, bias), store
        y = F.linear(x, weight, bias)
        if y.dtype != weight.dtype:
            raise RuntimeError(
                "backward in two halves (I and W) cannot be used with autocast; use a "
                "schedule with B, or convert the layers to the lower precision"
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, W and b; postponed ones are None."""
        x, weight = ctx.saved_tensors
        needs_x, *needed = ctx.needs_input_grad[:3]
        grad_x = gradient @ weight if needs_x else None  # (..., in)
        compute = partial(_weight_gradients, x, gradient, needed)
        if not any(needed):
            return grad_x, None, None, None
        if any(map(_has_hooks, ctx.parameters)):  # these must run once, in backward
            return grad_x, *compute(), None
        return grad_x, *ctx.store.compute(ctx.parameters, compute), None


def _has_hooks(parameter: Tensor | None) -> bool:
    """Return whether the user has registered a hook; this package's may run later."""
    hooks = getattr(parameter, "_backward_hooks", None) or {}
    return any(
        not getattr(hook, "__module__", "").startswith("ddp_course.")
        for hook in hooks.values()
    )


def _weight_gradients(
    x: Tensor, gradient: Tensor, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of W (out, in) and b (out,); None where not needed."""
    rows = gradient.reshape(-1, gradient.shape[-1])  # (N, out)
    return [
        rows.t() @ x.reshape(-1, x.shape[-1]) if needed[0] else None,  # (out, in)
        rows.sum(0) if needed[1] else None,  # (out,)
    ]


def split_backward(module: nn.Module, store: WeightGradStore) -> None:
    """Configure a module's linear layers to postpone their weights' gradients.

    Replaces the `forward` of each `nn.Linear` instance. Layers of other kinds that can
    postpone have an attribute `weight_grads`, which is set to `store`; all others
    compute their weights' gradients together with their input's.
    """
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.forward = partial(_forward, layer, store)
        elif hasattr(layer, "weight_grads"):
            layer.weight_grads = store


def _forward(layer: nn.Linear, store: WeightGradStore, x: Tensor) -> Tensor:
    return SplitLinear.apply(x, layer.weight, layer.bias, store)


class SplitBackward:
    """A part that adds the operations I and W to a runtime."""

    def __init__(self, module: nn.Module) -> None:
        self.store = WeightGradStore()
        # (stage, microbatch) -> postponed gradients, from I to W
        self.tasks: dict[tuple[int, int], list[Task]] = {}
        split_backward(module, self.store)

    def before_run(self, runtime: Runtime) -> None:
        """Add I and W to the operations of the runtime."""
        inputs = partial(self.inputs, runtime)
        runtime.operations |= {"I": inputs, "W": self.weights}

    def inputs(
        self, runtime: Runtime, stage: int, microbatch: int, gradient: Tensor | None
    ) -> Tensor | None:
        """Compute I: go backward, but postpone the weights' gradients."""
        with self.store.collect() as self.tasks[stage, microbatch]:
            return runtime.backward(stage, microbatch, gradient)

    def weights(self, stage: int, microbatch: int, _: None) -> None:
        """Compute W: the postponed gradients; each task frees its tensors."""
        tasks = self.tasks.pop((stage, microbatch))
        while tasks:
            tasks.pop()()
