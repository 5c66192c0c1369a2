"""A call that can be made again, with the same result. Explained in chapter 06."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Call:
    """A function with its arguments, but for the tensors among them, and its results.

    Attributes:
        num_inputs: how many tensors it takes.
        surroundings: what else its results depend on.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: list[Any],
        tree: pytree.TreeSpec,
        preserve_rng_state: bool,
    ) -> None:
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.function, self.tree, self.num_inputs = function, tree, len(inputs)
        self.leaves = [_GAP if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.surroundings = Surroundings(inputs, preserve_rng_state)
        self.results: tuple[list[Any], pytree.TreeSpec] | None = None

    def run(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Call the function, and return the tensors in its result."""
        leaves = _filled(self.leaves, tensors)
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        leaves, tree = pytree.tree_flatten(self.function(*args, **kwargs))
        gaps = [_GAP if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.results = gaps, tree
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def result_of(self, tensors: Iterable[Tensor]) -> Any:
        """Return the function's result, with these tensors in it."""
        gaps, tree = self.results
        return pytree.tree_unflatten(_filled(gaps, tensors), tree)


_GAP = object()  # where there was a tensor


def _filled(leaves: list[Any], tensors: Iterable[Tensor]) -> list[Any]:
    each = iter(tensors)
    return [next(each) if leaf is _GAP else leaf for leaf in leaves]


class Surroundings:
    """What a result depends on beside the arguments: random numbers and autocast."""

    def __init__(self, tensors: Iterable[Tensor], preserve_rng_state: bool) -> None:
        devices = {tensor.device for tensor in tensors}
        self.preserve = preserve_rng_state
        if preserve_rng_state:
            self.cpu = torch.get_rng_state()
            gpus = sorted(d.index for d in devices if d.type == "cuda")
            self.gpus = {index: torch.cuda.get_rng_state(index) for index in gpus}
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
            if self.preserve:
                stack.enter_context(torch.random.fork_rng(devices=list(self.gpus)))
                torch.set_rng_state(self.cpu)
                for index, state in self.gpus.items():
                    torch.cuda.set_rng_state(state, index)
            yield
