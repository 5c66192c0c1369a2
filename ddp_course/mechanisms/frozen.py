"""Check that a wrapped model has not changed; a strategy calls these checks itself.

This file imports only torch. Guards around PyTorch's own tools are in `guards`.
"""

from typing import Any

import torch
from torch import Tensor, nn


class Frozen:
    """The parameters of a module when a strategy wrapped it, and the frozen ones.

    Parameters that are added or unfrozen later would not be averaged. If the parameters
    are `pieces`, with which autograd does not compute, none may be frozen later or have
    hooks, either: nothing would call those hooks.
    """

    def __init__(self, module: nn.Module, *, pieces: bool = False) -> None:
        self.module = None if pieces else module  # None avoids a reference cycle
        self.parameters = dict(module.named_parameters())
        self.present = self._present()
        every = ((name, p, p.requires_grad) for name, p in self.parameters.items())
        self.kept = [(*of, trained) for *of, trained in every if pieces or not trained]

    def check(self) -> None:
        """Raise RuntimeError if parameters were exchanged, frozen or unfrozen."""
        for name, parameter, trained in self.kept:
            if parameter.requires_grad != trained:
                was, now = ("trained", "frozen") if trained else ("frozen", "trained")
                raise RuntimeError(
                    f"{name} was {was} when the model was wrapped, and is {now} now: "
                    "that comes too late for its gradients. Wrap the model again"
                )
            if self.module is None and _hooks_of(parameter):
                raise RuntimeError(
                    f"{name} has a hook, which would never run: autograd computes "
                    "with the whole parameter, and this is a piece of it. Register "
                    "hooks before the model is wrapped"
                )
        if self._present() != self.present:
            named = self.module.named_parameters()
            new = (name for name, p in named if p is not self.parameters.get(name))
            if name := next(new, ""):
                raise RuntimeError(added_too_late(name))
            raise RuntimeError(
                "a parameter that the model was wrapped with is gone, or tied to "
                "another now: change the model first, and wrap it then"
            )

    def _present(self) -> list[int]:
        """Return the ids of the module's parameters; faster than `parameters()`."""
        owners = () if self.module is None else self.module.modules()
        return [id(p) for owner in owners for p in owner._parameters.values()]


class KeepFrozen:
    """A part that refuses parameters added, removed or unfrozen after wrapping."""

    def after_replication(self, model: Any) -> None:
        """Record the parameters of the wrapped module."""
        self.frozen = Frozen(model.module)

    def before_forward(self, model: Any) -> None:
        """Raise RuntimeError if the module has or trains other parameters now."""
        if torch.is_grad_enabled():
            self.frozen.check()


def _hooks_of(parameter: Tensor) -> list[Any]:
    """Return the hooks of a parameter, without those of the course's meters."""
    hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    each = (hook for kind in hooks for hook in (kind or {}).values())
    meters = "ddp_course.measure"
    return [h for h in each if not getattr(h, "__module__", "").startswith(meters)]


def added_too_late(name: str) -> str:
    """Return the error text for a parameter that was added after wrapping."""
    return (
        f"{name} was put into the model after it was wrapped, so its gradients would "
        "not be averaged: change numbers in place, or wrap the model again"
    )


def check_first_order() -> None:
    """Raise RuntimeError in a backward pass with create_graph=True."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: the gradient of a gradient needs tensors that this "
            "parallelism has freed, or computed in one piece. For a gradient penalty, "
            "or forces, use DistributedDataParallel or ZeroRedundancyOptimizer"
        )
