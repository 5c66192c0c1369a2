"""Activation recomputation: forward keeps its inputs, and backward runs it again.

A block of a transformer keeps some sixteen times its input for backward. `recompute`
keeps the input alone, and has backward run the block's forward once more when its turn
comes: of N blocks only one has all its activations at a time, for one more forward in a
step of three (backward costs two). Read first `NaiveRecompute`, then `Recompute`; then
`recompute`, for arguments and results of any form.

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

from ddp_course.mechanisms.hooks import leaves_below


class NaiveRecompute(torch.autograd.Function):
    """The idea alone, for a function of one tensor: `NaiveRecompute.apply(block, x)`.

    The backward pass inside of backward puts the parameters' gradients where they
    belong, unseen by the graph outside ("reentrant", as with use_reentrant=True). So
    they get none if `x` needs none; `torch.autograd.grad` does not find them; those of
    a parameter that two such blocks share come twice, for which DDP cannot wait; and
    dropout draws other numbers the second time. Chapter 06.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run `function` without recording: nothing is kept but `x`."""
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None]:
        """Run it again, recorded, and go backward through it."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        torch.autograd.backward(output, gradient)
        return None, x.grad


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, of which backward will run forward again.

    Gradients are the same to the bit: random numbers (dropout) are drawn again as they
    were, which keeps some 5 KB per call. They reach parameters through the graph
    outside, so each comes once, hooks are called once, and DDP sees what it always
    sees.

    A block whose parameters are gathered for its forward and freed after it (stage 3,
    PyTorch's `fully_shard`) can be recomputed, if `function` is called inside of the
    module's own call, where they are gathered and the same objects each time:
    `recompute_blocks` does so. Backward has then to gather them before it reaches the
    block, and may free them when the gradients of the block's inputs are there. Called
    from outside, where they are not to be seen, it is an error in backward.

    Args:
        function: a module or a method of one; or a function that uses no parameters but
            those in its arguments. It must do the same when it is called again.
        args, kwargs: tensors, in lists and dicts, too, and anything else.

    Raises:
        TypeError: `function` cannot be called.
        RuntimeError: in backward: it used a parameter that is not its own; or the
            gradient of the gradient is asked for.

    Source: torch/utils/checkpoint.py. Chapter 06.
    """
    if not callable(function):
        raise TypeError(f"function is {function!r}; it must be a module or a function")
    owner = getattr(function, "__self__", function)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    own = owner.parameters() if isinstance(owner, nn.Module) else ()
    parameters = [p for p in own if isinstance(p, Tensor)]  # while they are there
    needed = any(tensor.requires_grad for tensor in (*inputs, *parameters))
    if not (needed and torch.is_grad_enabled()):
        return function(*args, **kwargs)
    call = Call(function, leaves, tree)
    return call.result_of(Recompute.apply(call, *inputs, *parameters))


class Recompute(torch.autograd.Function):
    """The idea, with what the naive version forgets: `apply(call, *tensors)`.

    All parameters are arguments, so the graph outside knows of them: their gradients
    are returned, and come once. What else a result depends on is as it was. Chapter 06.
    """

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run without recording; keep the inputs, of which others hold most."""
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return call(tensors[: call.num_inputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run it again, recorded; the gradients go where the tensors came from."""
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
    """Return the gradients of `wanted`. RuntimeError if any others would be lost."""
    if torch.is_grad_enabled():  # create_graph=True
        raise RuntimeError(
            "recompute has no gradient of its gradient (create_graph=True); take "
            "torch.utils.checkpoint with use_reentrant=False"
        )
    both = zip(outputs, gradients, strict=True)
    pairs = [(o, g) for o, g in both if o.requires_grad and g is not None]
    if lost := leaves_below(output for output, _ in pairs) - {*map(id, wanted)}:
        raise RuntimeError(
            f"{function!r} used {len(lost)} parameter(s) that are neither its own nor "
            "in its arguments, so they would get no gradient. Give recompute the "
            "module itself, or a method of it; if its parameters come and go, from "
            "inside of its forward (recompute_blocks)."
        )
    if not pairs:
        return [None] * len(wanted)
    ends, starts = zip(*pairs, strict=True)
    with _without_hooks(wanted):
        return torch.autograd.grad(ends, wanted, starts, allow_unused=True)


@contextmanager
def _without_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hold back the hooks of `Tensor.register_hook`: they belong to the graph outside.

    `torch.autograd.grad` would call them, and then they would be called again.
    """
    hooks = [p._backward_hooks for p in parameters if p._backward_hooks]
    held = [dict(of_one) for of_one in hooks]
    for of_one in hooks:
        of_one.clear()
    try:
        yield
    finally:
        for of_one, before in zip(hooks, held, strict=True):
            of_one.update(before)


# ---- a call that can be made again ---------------------------------------------------

_GAP = object()  # where there was a tensor


class Call:
    """A function with its arguments, but for the tensors among them, and its results.

    Called with these tensors, it returns those in the result. `surroundings` is what
    else its results depend on.
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
    """What a result depends on beside the arguments: random numbers and autocast."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors}
        self.cpu = torch.get_rng_state()
        gpus = sorted(d.index for d in devices if d.type == "cuda")
        self.gpus = {index: torch.cuda.get_rng_state(index) for index in gpus}
        self.modes = _get_current_function_mode_stack()  # such as our Autocast
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
        """Within this block everything is as it was; after it as before it."""
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
    """Make the blocks of a model keep their inputs alone.

    Their names, parameters and hooks stay as they are: only what `forward` does is
    changed, for the instance. Blocks are the members of all `nn.ModuleList`s of the
    model, as for stage 3. Raises ValueError if there are none, and if one is recomputed
    already. Chapter 06.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    blocks = dict.fromkeys(block for members in lists for block in members)
    if not blocks:
        raise ValueError("the model has no nn.ModuleList, so it has no blocks")
    for block in blocks:
        if "forward" in vars(block):
            kind = type(block).__name__
            raise ValueError(f"a {kind} has a forward of its own already: recomputed?")
    for block in blocks:
        block.forward = partial(recompute, block.forward)
