"""Parts of `PipelineParallel` that change how a stage goes backward.

    Recomputed     keeps what enters a stage, and runs its forward again before B or I
    SplitBackward  adds the operations I and W: backward in two halves

I computes what another stage waits for, W what nobody waits for before the optimizer.
The backward of y = x Wᵀ + b, with G the gradient of y, has three products:

    gradient of x    G W         the stage before cannot go on without it
    gradient of W    Gᵀ x        needed when the optimizer steps
    gradient of b    sum of G    likewise

Autograd computes them one after the other. `SplitLinear` computes the first, and leaves
the others for later if a `WeightGradStore` collects them; until then x and G are kept.
In a transformer the linear layers are nearly all of the weights' half; LayerNorm and
embeddings stay where they are, in the first half. The sums are the same, so the
gradients are, too.

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
    """Keep only what enters a stage, and run its forward again before its backward.

    Random numbers are drawn again as they were. All microbatches but one then need
    memory for their inputs alone, for one more forward in a step of three. (`recompute`
    does the same for a block of a model: chapter 06.)
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], tuple[Tensor, Any]] = {}  # from F to B or I

    def before_run(self, runtime: Runtime) -> None:
        """Replace F, if a backward will follow."""
        if torch.is_grad_enabled():
            runtime.operations["F"] = partial(self.forward, runtime)

    def forward(
        self, runtime: Runtime, stage: int, microbatch: int, x: Tensor
    ) -> Tensor | None:
        """F: record nothing, and keep the input."""
        self.kept[stage, microbatch] = x, random_state(x.device)
        with torch.no_grad():
            return runtime.forward(stage, microbatch, x)

    def before_compute(self, runtime: Runtime, action: Action) -> None:
        """Run forward again, recorded, before a backward enters its graph."""
        if action.op in ("B", "I"):
            stage, microbatch = action.stage, action.microbatch
            x, state = self.kept.pop((stage, microbatch))
            with drawn_again(state, x.device):
                runtime.forward(stage, microbatch, x)


def random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the states of the CPU's random generator and of the device's, if a GPU."""
    on_gpu = device.type == "cuda"
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None


@contextmanager
def drawn_again(
    state: tuple[Tensor, Tensor | None], device: torch.device
) -> Iterator[None]:
    """Within this block random numbers are those of `state`; after it as before it."""
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
    """Where layers leave what can be done later; `tasks` is None if that is now.

    A layer that can leave its weights' gradients for later has an attribute
    `weight_grads`, None or the store that its backward asks:

        of_weight, of_bias = store.compute((weight, bias), lambda: ...)

    That is `[gradient, gradient]`, or `[None, None]` while somebody collects:

        with store.collect() as tasks:
            loss.backward()        # the gradients of the inputs
        for task in tasks:
            task()                 # those of the weights
    """

    def __init__(self) -> None:
        self.tasks: list[Task] | None = None

    @contextmanager
    def collect(self) -> Iterator[list[Task]]:
        """Within this block, collect tasks in the list that it is given."""
        self.tasks = tasks = []
        try:
            yield tasks
        finally:
            self.tasks = None

    def compute(
        self, parameters: Gradients, gradients: Callable[[], Gradients]
    ) -> Gradients:
        """Return what `gradients` does, one for each parameter; later, as many Nones.

        For the backward of a layer. None in the place of a parameter or of its gradient
        is one that there is not.
        """
        if self.tasks is None:
            return gradients()
        self.tasks.append(partial(_accumulate, parameters, gradients))
        return [None] * len(parameters)


@torch.no_grad()
def _accumulate(parameters: Gradients, gradients: Callable[[], Gradients]) -> None:
    """Add gradients to what the parameters have, as autograd does: hooks are called."""
    pairs = zip(parameters, gradients(), strict=True)
    there = [(p, gradient) for p, gradient in pairs if gradient is not None]
    if there:
        torch.autograd.backward(*zip(*there, strict=True))


class SplitLinear(torch.autograd.Function):
    """`F.linear`, whose weights' gradients can be put off."""

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
                "backward in two halves (I and W) cannot be used with autocast; take a "
                "schedule with B, or a model whose layers are in the lower precision"
            )
        return y

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
    return SplitLinear.apply(x, layer.weight, layer.bias, store)


class SplitBackward:
    """Teaches a runtime the operations I and W."""

    def __init__(self, module: nn.Module) -> None:
        self.store = WeightGradStore()
        self.tasks: dict[tuple[int, int], list[Task]] = {}  # from I to W
        split_backward(module, self.store)

    def before_run(self, runtime: Runtime) -> None:
        """Add the two operations."""
        inputs = partial(self.inputs, runtime)
        runtime.operations |= {"I": inputs, "W": self.weights}

    def inputs(
        self, runtime: Runtime, stage: int, microbatch: int, gradient: Tensor | None
    ) -> Tensor | None:
        """I: go backward, but leave the weights' gradients for later."""
        with self.store.collect() as self.tasks[stage, microbatch]:
            return runtime.backward(stage, microbatch, gradient)

    def weights(self, stage: int, microbatch: int, _: None) -> None:
        """W: compute the gradients that I has left, and free what each one needed."""
        tasks = self.tasks.pop((stage, microbatch))
        while tasks:
            tasks.pop()()
