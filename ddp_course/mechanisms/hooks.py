"""Autograd hooks of data parallelism.

Hooks refer weakly to the object whose method they call, and are removed with it. A
parameter lists the objects that average its gradients (`listeners`). Chapter 05.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


class Weakly(weakref.ref):
    """A weak reference that is pickled as None."""

    def __reduce__(self) -> tuple[type, tuple]:
        return type(None), ()


def on_gradient(parameter: Tensor, method: Callable[..., None], *args: Any) -> Node:
    """Call the bound `method(*args)` whenever autograd has accumulated a gradient.

    The method runs after all hooks of the parameter, also those that are registered
    later. The caller must keep the returned node: the hook is removed with it.
    """
    node = get_gradient_edge(parameter).node
    while_alive(node.register_hook, method, *args)
    owners = [*listeners(parameter), method.__self__]
    parameter.listeners = [Weakly(owner) for owner in owners]
    return node


def on_backward(tensors: Iterable[Tensor], method: Callable[[], None]) -> None:
    """Call the bound `method()` when a backward pass reaches one of the tensors."""
    for tensor in tensors:
        if tensor.grad_fn is not None:  # computed, not an input or a parameter
            while_alive(tensor.register_hook, method)


def while_alive(register: Callable, method: Callable[..., None], *args: Any) -> None:
    """Register a hook that calls `method(*args)` while the method's object lives."""
    weak = weakref.WeakMethod(method, lambda _: handle.remove())

    def hook(*_: Any) -> None:
        if (alive := weak()) is not None:
            alive(*args)

    handle = register(hook)


def listeners(parameter: Tensor) -> list[Any]:
    """Return the objects that `on_gradient` calls for this parameter, in order."""
    weak = getattr(parameter, "listeners", ())
    return [one for each in weak if each and (one := each())]


# ---- objects that average gradients --------------------------------------------------


class Averager:
    """An object that averages gradients, except in a `defer` block."""

    deferrals = 0  # open `defer` blocks

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Let the backward passes of this block only accumulate gradients."""
        self.deferrals += 1
        try:
            yield
        finally:
            self.deferrals -= 1

    def __getstate__(self) -> Any:
        """Raise TypeError: a copy would have none of the parameters' hooks."""
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: the copy would "
            "average no gradients. Copy the wrapped module (`.module`), or save its "
            "state_dict()"
        )

    def average(self) -> None:
        """Average the present gradients; all ranks call it together."""
        raise NotImplementedError
