"""Where data parallelism takes hold of autograd: hooks, and a walk over its graph.

Hooks refer weakly to the object whose method they call, and are removed with it. What
averages a parameter's gradients is found through the parameter (`held`): code that goes
backward several times for one step need not know it. Chapter 05.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge


class Weakly(weakref.ref):
    """A weak reference that is pickled as None."""

    def __reduce__(self) -> tuple[type, tuple]:
        return type(None), ()


def on_gradient(parameter: Tensor, method: Callable[..., None], *args: Any) -> Node:
    """Call the bound `method(*args)` whenever the gradient of `parameter` is there.

    That is after all hooks of the parameter, also those that come later. The caller
    keeps the node that is returned: the hook goes with it.
    """
    node = get_gradient_edge(parameter).node
    while_alive(node.register_hook, method, *args)
    owners = [*listeners(parameter), method.__self__]
    parameter.listeners = [Weakly(owner) for owner in owners]
    return node


def on_backward(tensors: Iterable[Tensor], method: Callable[[], None]) -> None:
    """Call the bound `method()` when a backward pass reaches one of the tensors."""
    for tensor in tensors:
        if tensor.grad_fn is not None:  # not an input, or a parameter as it is
            while_alive(tensor.register_hook, method)


def while_alive(register: Callable, method: Callable[..., None], *args: Any) -> None:
    """Register a hook that calls `method(*args)`; it goes with the method's object."""
    weak = weakref.WeakMethod(method, lambda _: handle.remove())

    def hook(*_: Any) -> None:
        if (alive := weak()) is not None:
            alive(*args)

    handle = register(hook)


def listeners(parameter: Tensor) -> list[Any]:
    """Return the objects that `on_gradient` calls for this parameter, in order."""
    weak = getattr(parameter, "listeners", ())
    return [one for each in weak if each and (one := each())]


# ---- who averages what is there ------------------------------------------------------


class Averager:
    """An object that averages gradients, except while it is held (`held`)."""

    held = 0  # the number of blocks that hold it

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let the backward passes of this block only add up."""
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    def __getstate__(self) -> Any:
        """Raise TypeError: parameters are copied without those who listen to them."""
        raise TypeError(
            "what averages gradients cannot be copied or pickled: the copy would "
            "average nothing. Copy the wrapped module (`.module`), or save its "
            "state_dict()"
        )

    def average(self) -> None:
        """Average the gradients that there are; a collective call."""
        raise NotImplementedError


@contextmanager
def held(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let gradients add up in this block, and average them at its end, all at once.

    For a pipeline, which goes backward once for each microbatch. All listeners of these
    gradients average their sum, as if it had come in one pass; an inner block leaves
    that to the outer one. After an error nothing is averaged. Chapter 10.
    """
    those = dict.fromkeys(one for p in parameters for one in listeners(p))
    with ExitStack() as stack:
        for one in those:
            stack.enter_context(one.hold())
        yield
    for one in those:
        if not one.held:
            one.average()


# ---- what a backward pass is going to reach ------------------------------------------


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
