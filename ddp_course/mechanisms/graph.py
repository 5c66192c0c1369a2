"""The tensors that a backward pass will reach: a walk over autograd's graph.

Chapter 05.
"""

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors in a module's output: in lists, dicts, dataclasses, ..."""
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
    # A tensor without a grad_fn may be a parameter that the module returns itself.
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
