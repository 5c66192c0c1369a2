"""Master weights: parameters in 16 bits, and float32 copies that the optimizer steps.

A step changes a weight by a thousandth or less, but neighbouring bfloat16 numbers
differ by a 256th. So the optimizer adds its updates in float32, and the model computes
with the rounded result:

    gradient (16 bits) -> float32 -> step of the float32 copy -> rounded -> parameter

Bytes per parameter with Adam: 2 for the parameter, 2 for its gradient, and 12 for the
copy and two states. That is 16, as in float32 (4 + 4 + 8). The savings are elsewhere:
in activations, messages and time. (With gradients added up in float32 it is 18, as in
Megatron-LM with bfloat16; with float32 copies of float16 gradients it is 20.)

Micikevicius et al. 2018, "Mixed Precision Training", section 3.1; Rajbhandari et al.
2020, "ZeRO", section 3.1. Chapter 12.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.mechanisms.placements import clip_grad_norm_, placed

MASTER = "master"


class MasterWeights(Optimizer):
    """An optimizer that steps float32 copies of parameters, and rounds them back.

        model = build_gpt().to(torch.bfloat16)
        optimizer = MasterWeights(model.parameters(), AdamW, lr=3e-4)

    The state of a parameter is the inner optimizer's state and the copy, "master". So
    states are saved, loaded and sharded like any other optimizer's: the class can be
    the `optimizer_class` of a ZeroRedundancyOptimizer, with functools.partial. If other
    code changes a parameter, such as `load_state_dict` of the model, the next step
    begins with the changed numbers.

    A `GradScaler` unscales the gradients of the copies, in float32. Afterwards, clip
    these gradients with the optimizer's own method, not the parameters' gradients:

        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)

    Args:
        params: as for any optimizer.
        optimizer_class: an optimizer that updates each element independently.
        **defaults: arguments of `optimizer_class`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        **defaults: Any,
    ) -> None:
        super().__init__(params, defaults)
        groups = [self._inner_group(group) for group in self.param_groups]
        self.optim = optimizer_class(groups, **defaults)
        # The gradients that were copied, each with its version; None before copying.
        self.copied: list[tuple[Tensor, int] | None] | None = None
        for group, inner in self._groups():
            # Fill in the inner optimizer's default arguments.
            group.update({k: v for k, v in inner.items() if k != "params"})

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter group with a float32 copy of each parameter."""
        copies = []
        for parameter in group["params"]:
            copy = parameter.detach().to(torch.float32, copy=True)
            if placement := placed(parameter):  # so that norms count each number once
                copy.placed = placement
            self.state[parameter][MASTER] = copy
            copies.append(copy.requires_grad_(parameter.requires_grad))
        return {**group, "params": copies}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with copies."""
        super().add_param_group(param_group)
        if hasattr(self, "optim"):  # PyTorch's constructor adds the first groups
            group = self.param_groups[-1]
            self.optim.add_param_group(self._inner_group(group))
            self.copied = None

    def _groups(self) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
        return zip(self.param_groups, self.optim.param_groups, strict=True)

    @property
    def unscaled(self) -> Optimizer:
        """The inner optimizer, whose float32 gradients a `GradScaler` unscales."""
        self.copy_gradients()
        return self.optim

    def copy_gradients(self) -> None:
        """Copy the parameters' gradients to the copies, in float32."""
        for group, inner in self._groups():
            for parameter, copy in zip(group["params"], inner["params"], strict=True):
                gradient = parameter.grad
                copy.grad = None if gradient is None else gradient.to(copy.dtype)
        self.copied = self._versions()

    def _versions(self) -> list[tuple[Tensor, int] | None]:
        gradients = (p.grad for group in self.param_groups for p in group["params"])
        return [None if g is None else (g, g._version) for g in gradients]

    def _ensure_copied(self) -> None:
        """Copy the gradients, unless they were copied already.

        Raises RuntimeError if gradients were changed since then; usually, by clipping.
        """
        if self.copied is None:
            self.copy_gradients()
        pairs = [*zip(self.copied, self._versions(), strict=True)]
        if any((b and b[0]) is not (n and n[0]) for b, n in pairs):
            self.copy_gradients()  # there was another backward
        elif any(b and b[1] != n[1] for b, n in pairs):
            raise RuntimeError(
                "parameters' gradients were changed after unscale_(optimizer) had "
                "copied them to float32: the step would not use the change. Clip the "
                "copies, with optimizer.clip_grad_norm_(max_norm)"
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of the copies to a norm of at most `max_norm`.

        Returns the norm before scaling. For sharded parameters, the norm is over all
        ranks, which call this together. Like torch.nn.utils.clip_grad_norm_.
        """
        if self.copied is None:
            self.copy_gradients()
        copies = (c for group in self.optim.param_groups for c in group["params"])
        return clip_grad_norm_(copies, max_norm, norm_type=norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients to None, or to zeros."""
        super().zero_grad(set_to_none)
        self.optim.zero_grad()
        self.copied = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Step the copies, and round them into the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in self._groups():
            # A scheduler may have changed the learning rate in the outer groups.
            inner.update({k: v for k, v in group.items() if k != "params"})
        self._ensure_copied()
        self._copy_changes()
        self.optim.step()
        for group, inner in self._groups():
            for parameter, copy in zip(group["params"], inner["params"], strict=True):
                if copy.grad is not None:
                    parameter.copy_(copy)
                    copy.grad = None
                    self.state[parameter].update(self.optim.state[copy])
        self.copied = None
        return loss

    def _copy_changes(self) -> None:
        """Update copies of parameters that other code has changed."""
        for group, inner in self._groups():
            for parameter, copy in zip(group["params"], inner["params"], strict=True):
                same = parameter == copy.to(parameter.dtype)
                if not same.all():
                    copy.copy_(torch.where(same, copy, parameter.to(copy.dtype)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, in float32; PyTorch's method would round it to 16 bits.

        As in PyTorch's method, states that are not in `state_dict` are dropped.
        """
        without_states = dict(state_dict)
        states, without_states["state"] = without_states["state"], {}
        super().load_state_dict(without_states)
        self.optim.state.clear()
        order = [p for group in self.param_groups for p in group["params"]]
        saved_groups = without_states["param_groups"]
        numbers = [n for group in saved_groups for n in group["params"]]
        copies = [c for group in self.optim.param_groups for c in group["params"]]
        for number, parameter, copy in zip(numbers, order, copies, strict=True):
            for name, value in states.get(number, {}).items():
                if name == MASTER:
                    with torch.no_grad():
                        copy.copy_(value)
                        parameter.copy_(value)
                else:
                    like = getattr(value, "shape", None) == copy.shape  # not "step"
                    own = value.to(copy.device, copy=True) if like else deepcopy(value)
                    self.optim.state[copy][name] = own
            self.state[parameter] = {MASTER: copy, **self.optim.state[copy]}
