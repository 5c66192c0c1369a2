"""Parameters side by side, so that a message is one tensor, not one per parameter.

Chapter 13.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class ParameterRow:
    """Parameters side by side: one row of weights and one of gradients, on the CPU.

    Each parameter, and its gradient, becomes a view of its part of the row. Frozen
    parameters stay outside, and a tied one has one place. `multiple_of` pads the row
    with zeros. Raises ValueError if `params` has no trained parameter, has parameters
    of several types or on a GPU, or has other objects, such as a module.
    """

    def __init__(self, params: Iterable[nn.Parameter], multiple_of: int = 1) -> None:
        everything = list(params) if isinstance(params, Iterable) else [params]
        if wrong := [p for p in everything if not isinstance(p, Tensor)]:
            raise ValueError(
                f"params has an object of type {type(wrong[0]).__name__}; it must have "
                "parameters only: pass model.parameters()"
            )
        params = dict.fromkeys(p for p in everything if p.requires_grad)
        if len(kinds := {(p.dtype, p.device.type) for p in params}) != 1:
            raise ValueError(
                f"params are of {len(kinds)} kinds: {kinds or 'none'}; they must have "
                "one type, on one device, and at least one must be trained"
            )
        if {kind for _, kind in kinds} != {"cpu"}:
            raise ValueError(
                "params are on a GPU; a server needs them on the CPU: move the model "
                "with cpu()"
            )
        dtype, numel = next(iter(params)).dtype, sum(p.numel() for p in params)
        numel += -numel % multiple_of
        self.views: dict[nn.Parameter, Tensor] = dict.fromkeys(params)
        self.form = digest([(tuple(p.shape), str(p.dtype)) for p in params])
        weights, gradient = torch.zeros(2, numel, dtype=dtype)
        for parameter, view in self._places(weights):
            view.copy_(parameter.detach())
        self.use_memory(weights, gradient)

    def _places(self, row: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter and its part of a row."""
        end = 0
        for parameter in self.views:
            yield parameter, row[end : end + parameter.numel()].view(parameter.shape)
            end += parameter.numel()

    def use_memory(self, weights: Tensor, gradient: Tensor) -> None:
        """Place the parameters and their gradients in these two rows, as views."""
        self.weights, self.gradient = weights, gradient
        for parameter, view in self._places(weights):
            parameter.data = view
        self.views = dict(self._places(gradient))
        self.clear()

    def parts(self, count: int) -> list[Self]:
        """Return the row in equal parts, which have no parameters."""
        parts = []
        for pair in zip(
            self.weights.chunk(count), self.gradient.chunk(count), strict=True
        ):
            part = copy(self)
            part.views, (part.weights, part.gradient) = {}, pair
            parts.append(part)
        return parts

    def clear(self) -> None:
        """Set the gradients to zero; each parameter's `grad` is its view again."""
        self.gradient.zero_()
        for parameter, view in self.views.items():
            parameter.grad = view

    def collect(self) -> Tensor:
        """Return the row of gradients, with zeros for parameters without a gradient."""
        for parameter, view in self.views.items():
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
        return self.gradient

    @torch.no_grad()
    def step(self, optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
        """Step the optimizer with the mean of the gradients, added in this order."""
        total = gradients[0]
        if len(gradients) > 1:
            total = self.gradient.copy_(total)
            for gradient in gradients[1:]:
                total += gradient
            total /= len(gradients)
        for parameter, view in self._places(total):
            parameter.grad = view
        optimizer.step()


def digest(form: Any) -> int:
    """Return a number that a server and its workers compare: equal for equal forms."""
    return zlib.crc32(repr(form).encode())
