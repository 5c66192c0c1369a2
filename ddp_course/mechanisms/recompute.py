"""Activation recomputation: store a block's inputs only, and run it again in backward.

A block of a transformer stores some sixteen times its input for backward. `recompute`
stores only the input, and backward runs the block's forward again: at any time, only
one of N blocks has all its activations in memory. A step then costs four forwards
instead of three (backward costs two). Read first `NaiveRecompute`, then `Recompute`;
then `recompute`, for arguments and results of any form.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174;
torch/utils/checkpoint.py, where it is called checkpointing. Explained in chapter 06.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from ddp_course.mechanisms.graph import leaves_below


class NaiveRecompute(torch.autograd.Function):
    """Recomputation of a function of one tensor: `NaiveRecompute.apply(block, x)`.

    A backward pass inside of backward writes the parameters' gradients into `.grad`,
    unseen by the graph outside ("reentrant", as with use_reentrant=True). So parameters
    get no gradient if `x` needs none; `torch.autograd.grad` does not find them; a
    parameter that two such blocks share gets its gradient twice, for which DDP cannot
    wait; and dropout draws other numbers the second time. Chapter 06.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run `function` without recording; save only `x`."""
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        """Run `function` again, recorded, and backward through it."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`; backward will run the function again.

    Gradients are the same to the bit: random numbers (dropout) are drawn again, from
    saved states of some 5 KB per call. Gradients reach parameters through the graph
    outside, so each comes once, hooks are called once, and DDP sees no difference.

    A block whose parameters are gathered for its forward and freed after it (stage 3,
    PyTorch's `fully_shard`) can be recomputed if `function` is called inside of the
    module's own call, where they are gathered and the same objects each time:
    `recompute_blocks` does so. Backward then has to gather them before it reaches the
    block, and may free them when the gradients of the block's inputs are computed.
    Called from outside, where the parameters are not gathered, it fails in backward.

    Args:
        function: a module or a method of one; or a function that uses no parameters but
            those in its arguments. It must do the same when it is called again.
        args, kwargs: its arguments; tensors may be nested in lists and dicts.

    Raises:
        TypeError: `function` cannot be called.
        RuntimeError: in backward, if `function` used a parameter that is not its own,
            or with create_graph=True.

    Source: torch/utils/checkpoint.py. Chapter 06.
    """
    if not callable(function):
        raise TypeError(f"function is {function!r}; it must be a module or a function")
    owner = getattr(function, "__self__", function)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    own = owner.parameters() if isinstance(owner, nn.Module) else ()
    parameters = [p for p in own if isinstance(p, Tensor)]  # they are gathered here
    needed = any(tensor.requires_grad for tensor in (*inputs, *parameters))
    if not (needed and torch.is_grad_enabled()):
        return function(*args, **kwargs)
    call = RecomputedCall(function, leaves, tree)
    return call.result_of(Recompute.apply(call, *inputs, *parameters))


class Recompute(torch.autograd.Function):
    """Recomputation without the naive version's faults: `apply(call, *tensors)`.

    All parameters are arguments, so the graph outside knows them: their gradients are
    returned, and come once. Random numbers and autocast are restored. Chapter 06.
    """

    @staticmethod
    def forward(ctx: Any, call: RecomputedCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the call without recording; save its tensors: most exist anyway."""
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return call(tensors[: call.num_inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the call again, recorded; return the gradients of its tensors."""
        call, needed = ctx.call, ctx.needs_input_grad[1:]
        inputs = ctx.saved_tensors[: call.num_inputs]
        parameters = ctx.saved_tensors[call.num_inputs :]
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
        with call.surroundings.restored(), torch.enable_grad():
            outputs = call(inputs)
        each = zip((*inputs, *parameters), needed, strict=True)
        wanted = [tensor for tensor, need in each if need]
        found = iter(_gradients(call.function, outputs, gradients, wanted))
        return None, *(next(found) if need else None for need in needed)


def _gradients(
    function: Any,
    outputs: Iterable[Tensor],
    gradients: Iterable[Tensor | None],
    wanted: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """Return the gradients of `wanted`; raise RuntimeError if others would be lost."""
    if torch.is_grad_enabled():  # create_graph=True
        raise RuntimeError(
            "recompute has no gradient of its gradient (create_graph=True); use "
            "torch.utils.checkpoint with use_reentrant=False"
        )
    both = zip(outputs, gradients, strict=True)
    pairs = [(o, g) for o, g in both if o.requires_grad and g is not None]
    if lost := leaves_below(output for output, _ in pairs) - {*map(id, wanted)}:
        raise RuntimeError(
            f"{function!r} used {len(lost)} parameter(s) that are neither its own nor "
            "in its arguments, so they would get no gradient. Pass the module "
            "itself, or a method of it, to recompute; if its parameters are gathered "
            "and freed, call it inside of the module's forward (recompute_blocks)."
        )
    if not pairs:
        return [None] * len(wanted)
    ends, starts = zip(*pairs, strict=True)
    with _without_hooks(wanted):
        return torch.autograd.grad(ends, wanted, starts, allow_unused=True)


@contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Disable the hooks of `Tensor.register_hook`: the graph outside calls them.

    `torch.autograd.grad` would call them first, so they would be called twice.
    """
    hooks = [p._backward_hooks for p in parameters if p._backward_hooks]
    saved = [dict(hooks_of_one) for hooks_of_one in hooks]
    for hooks_of_one in hooks:
        hooks_of_one.clear()
    try:
        yield
    finally:
        for hooks_of_one, before in zip(hooks, saved, strict=True):
            hooks_of_one.update(before)


# ---- a call that can be repeated -----------------------------------------------------

_GAP = object()  # stands for a tensor in a list of leaves


class RecomputedCall:
    """A function with its arguments, without the tensors among them.

    Called with these tensors, it returns the tensors in the function's result.
    """

    def __init__(
        self, function: Callable[..., Any], leaves: list[Any], tree: pytree.TreeSpec
    ) -> None:
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.function, self.tree, self.num_inputs = function, tree, len(inputs)
        self.leaves = [_GAP if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.surroundings = Surroundings(inputs)
        self.results: tuple[list[Any], pytree.TreeSpec] | None = None

    def __call__(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Call the function, and return the tensors in its result."""
        args, kwargs = _with_tensors(self.leaves, self.tree, tensors)
        leaves, tree = pytree.tree_flatten(self.function(*args, **kwargs))
        gaps = [_GAP if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.results = gaps, tree
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def result_of(self, tensors: Iterable[Tensor]) -> Any:
        """Return the function's result, with these tensors in it."""
        return _with_tensors(*self.results, tensors)


def _with_tensors(
    leaves: list[Any], tree: pytree.TreeSpec, tensors: Iterable[Tensor]
) -> Any:
    each = iter(tensors)
    filled = [next(each) if leaf is _GAP else leaf for leaf in leaves]
    return pytree.tree_unflatten(filled, tree)


class Surroundings:
    """The state that a result depends on besides arguments: random numbers, autocast.

    `tensors` are the arguments: the random states of their GPUs are saved.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors}
        self.cpu = torch.get_rng_state()
        gpus = sorted(d.index for d in devices if d.type == "cuda")
        self.gpus = {index: torch.cuda.get_rng_state(index) for index in gpus}
        self.modes = _get_current_function_mode_stack()  # such as `precision.Autocast`
        self.autocasts = [
            {
                "device_type": kind,
                "dtype": torch.get_autocast_dtype(kind),
                "enabled": torch.is_autocast_enabled(kind),
                "cache_enabled": torch.is_autocast_cache_enabled(),
            }
            for kind in sorted({"cpu", *(d.type for d in devices)})
            if torch.amp.is_autocast_available(kind)
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this state within the block, and the present one after it."""
        with ExitStack() as stack:
            for autocast in self.autocasts:
                stack.enter_context(torch.autocast(**autocast))
            for mode in self.modes:
                stack.enter_context(mode)
            stack.enter_context(torch.random.fork_rng(devices=list(self.gpus)))
            torch.set_rng_state(self.cpu)
            for index, state in self.gpus.items():
                torch.cuda.set_rng_state(state, index)
            yield


def recompute_blocks(model: nn.Module) -> None:
    """Replace `forward` of a model's blocks by one that recomputes.

    Names, parameters and hooks do not change. Blocks are the members of all
    `nn.ModuleList`s of the model, as for stage 3. Raises ValueError if there are none,
    or if one is recomputed already. Chapter 06.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    blocks = dict.fromkeys(block for members in lists for block in members)
    if not blocks:
        raise ValueError(
            "the model has no nn.ModuleList, so it has no blocks; put the modules to "
            "recompute into one, as self.blocks = nn.ModuleList(...)"
        )
    for block in blocks:
        if "forward" in vars(block):
            kind = type(block).__name__
            raise ValueError(
                f"this {kind} has a forward of its own already; call recompute_blocks "
                "once"
            )
    for block in blocks:
        block.forward = partial(recompute, block.forward)
