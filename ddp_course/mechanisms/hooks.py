"""Where data parallelism takes hold of autograd: two hooks and a walk over its graph.

A parameter's gradient is complete when autograd has accumulated it; a backward pass
reaches a module when the gradient of one of its outputs is there; and the parameters
that it is going to reach are the leaves below those outputs. Chapter 05.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def on_gradient(parameter: Tensor, method: Callable[..., None], *args: Any) -> None:
    """Call the bound `method(*args)` whenever the gradient of `parameter` is there.

    It is held weakly: when its object is gone the hook goes, too. Otherwise a module
    that is wrapped a second time would be averaged twice.
    """
    weak = weakref.WeakMethod(method, lambda _: handle.remove())

    def hook(_: Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(*args)

    handle = parameter.register_post_accumulate_grad_hook(hook)


def on_backward(tensors: Iterable[Tensor], method: Callable[[], None]) -> None:
    """Call the bound `method()` when a backward pass reaches one of the tensors."""
    weak = weakref.WeakMethod(method)

    def hook(_: Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive()

    for tensor in tensors:
        if tensor.grad_fn is not None:  # not an input, or a parameter as it is
            tensor.register_hook(hook)


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in what a module returned: lists, dicts, dataclasses, ..."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from tensors_in(item)
    elif isinstance(output, dict):
        yield from tensors_in(list(output.values()))
    elif is_dataclass(output):
        yield from tensors_in([getattr(output, f.name) for f in fields(output)])


def leaves_below(tensors: Iterable[Tensor]) -> set[int]:
    """Return the `id` of every leaf that a backward from these tensors would reach."""
    tensors = list(tensors)
    # A tensor without a grad_fn may be a parameter that is returned as it is.
    leaves = {id(tensor) for tensor in tensors if tensor.grad_fn is None}
    todo = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):  # it accumulates a leaf's gradient
            leaves.add(id(node.variable))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return leaves
