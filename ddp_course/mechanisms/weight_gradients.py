"""Weights' gradients that are computed later than those of the inputs.

The backward of a layer has two halves: the gradient of its input, for which the layer
before it waits, and those of its weights, for which nobody waits before the optimizer
steps. A layer that can leave the second half for later has an attribute `weight_grads`,
None or the store that it asks:

    of_weight, of_bias = store.compute((weight, bias), lambda: ...)

That is `[gradient, gradient]`, or `[None, None]` while somebody collects:

    with store.collect() as tasks:
        loss.backward()        # the gradients of the inputs
    for task in tasks:
        task()                 # those of the weights

Qi et al. 2024, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2, and the
WeightGradStore of its code. Chapter 11.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

Gradients = Sequence[Tensor | None]
Task = Callable[[], None]


class WeightGradStore:
    """Where layers leave what can be done later; `tasks` is None if that is now."""

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
