"""Master weights, loss scaling and autocast, with nothing but PyTorch.

`MasterWeights`, `GradScaler` and `Autocast` also support more optimizers, saved states,
several ranks and more operations. Chapter 12.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode


class NaiveMasterWeights:
    """An optimizer that steps float32 copies, and rounds them into the parameters."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizer_class: Callable[..., Optimizer],
        **options: Any,
    ) -> None:
        self.parameters = list(parameters)
        self.copies = [p.detach().float().clone() for p in self.parameters]
        self.optimizer = optimizer_class(self.copies, **options)

    @torch.no_grad()
    def step(self) -> None:
        """Step the copies with the parameters' gradients."""
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, copy in zip(self.parameters, self.copies, strict=True):
            parameter.copy_(copy)  # rounds


class NaiveGradScaler:
    """A scaler that multiplies the loss by S, and skips steps with inf or nan.

    S is `factor` at first; it doubles after `interval` steps without inf or nan.
    """

    def __init__(self, factor: float = 2.0**16, interval: int = 2000) -> None:
        self.factor, self.interval, self.clean_steps = factor, interval, 0

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss times S."""
        return loss * self.factor

    def step(self, optimizer: Optimizer) -> None:
        """Unscale the gradients; step if all are finite; choose the next S."""
        stepped = (p for group in optimizer.param_groups for p in group["params"])
        gradients = [p.grad for p in stepped if p.grad is not None]
        for gradient in gradients:
            gradient.div_(self.factor)
        if not all(gradient.isfinite().all() for gradient in gradients):
            self.factor, self.clean_steps = self.factor / 2, 0
            return
        optimizer.step()
        self.clean_steps += 1
        if self.clean_steps == self.interval:
            self.factor, self.clean_steps = self.factor * 2, 0


PRODUCTS = {"linear", "matmul", "scaled_dot_product_attention"}


class NaiveAutocast(TorchFunctionMode):
    """A context manager: products compute in bfloat16, and the loss in float32."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Cast the tensor arguments of a function in the table, and call it."""
        kinds = dict.fromkeys(PRODUCTS, torch.bfloat16)
        kinds["cross_entropy"] = torch.float32
        dtype = kinds.get(getattr(function, "__name__", ""))
        if dtype is not None:
            floats = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
            pairs = zip(args, floats, strict=True)
            args = [a.to(dtype) if is_float else a for a, is_float in pairs]
        return function(*args, **(kwargs or {}))
