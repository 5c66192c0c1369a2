"""Master weights: parameters in 16 bits, and a float32 copy of each that is stepped.

A step changes a weight by a thousandth of it, or less; bfloat16 has no number that is
nearer than a 256th. So the optimizer adds up in float32, and what the model computes
with is that, rounded:

    gradient (16 bits) -> float32 -> step of the float32 copy -> rounded -> parameter

Bytes for each parameter with Adam: 2 for it, 2 for its gradient, and 12 for the copy
and two states: 16, as in float32, which has 4 + 4 + 8. What is saved is elsewhere:
activations, messages, time. (Gradients that are added up in float32 make it 18, as in
Megatron-LM with bfloat16; copies of float16 gradients beside them 20.)

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
    """Steps float32 copies of parameters with `optimizer_class`, and rounds them back.

        model = build_gpt().to(torch.bfloat16)
        optimizer = MasterWeights(model.parameters(), AdamW, lr=3e-4)

    The state of a parameter is that of the optimizer inside, and its copy, "master", so
    states are saved, loaded and cut into shards like any other optimizer's: it can be
    the `optimizer_class` of a ZeroRedundancyOptimizer, by functools.partial. If a
    parameter was changed from outside, as by `load_state_dict` of the model, the next
    step begins with the changed numbers.

    A `GradScaler` unscales the gradients of the copies, in float32. After it has, clip
    them by `clip_grad_norm_` of this optimizer, not the parameters' gradients:

        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)

    Args:
        params: as of any optimizer.
        optimizer_class: any that treats each element alone.
        **defaults: its arguments.
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
        # The gradients that the copies have got, each with its version; None before.
        self.copied: list[tuple[Tensor, int] | None] | None = None
        for group, inner in self._groups():
            # What was not given has the optimizer's own defaults.
            group.update({k: v for k, v in inner.items() if k != "params"})

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group of copies, like one of the parameters."""
        copies = []
        for parameter in group["params"]:
            copy = parameter.detach().to(torch.float32, copy=True)
            if way := placed(parameter):  # a norm counts each number once
                copy.placed = way
            self.state[parameter][MASTER] = copy
            copies.append(copy.requires_grad_(parameter.requires_grad))
        return {**group, "params": copies}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to be stepped, with copies."""
        super().add_param_group(param_group)
        if hasattr(self, "optim"):  # PyTorch's constructor adds the first groups
            group = self.param_groups[-1]
            self.optim.add_param_group(self._inner_group(group))
            self.copied = None

    def _groups(self) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
        return zip(self.param_groups, self.optim.param_groups, strict=True)

    @property
    def unscaled(self) -> Optimizer:
        """What has the gradients that a `GradScaler` has to unscale: in float32."""
        self.give_gradients()
        return self.optim

    def give_gradients(self) -> None:
        """Let the copies have the parameters' gradients, in float32."""
        for group, inner in self._groups():
            for parameter, copy in zip(group["params"], inner["params"], strict=True):
                gradient = parameter.grad
                copy.grad = None if gradient is None else gradient.to(copy.dtype)
        self.copied = self._versions()

    def _versions(self) -> list[tuple[Tensor, int] | None]:
        gradients = (p.grad for group in self.param_groups for p in group["params"])
        return [None if g is None else (g, g._version) for g in gradients]

    def _check_gradients(self) -> None:
        """Copy the gradients, unless the copies have got them already.

        Raises RuntimeError if they were changed since: clipped, most likely.
        """
        if self.copied is None:
            self.give_gradients()
        pairs = [*zip(self.copied, self._versions(), strict=True)]
        if any((b and b[0]) is not (n and n[0]) for b, n in pairs):
            self.give_gradients()  # those of another backward
        elif any(b and b[1] != n[1] for b, n in pairs):
            raise RuntimeError(
                "gradients of parameters were changed after unscale_(optimizer), when "
                "their float32 copies had been made already: the step would not see "
                "it. Clip the copies, by optimizer.clip_grad_norm_(max_norm)"
            )

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of the copies to a norm of at most `max_norm`.

        Returns the norm before; of parameters in shards, that over all ranks, which
        call it together. As torch.nn.utils.clip_grad_norm_.
        """
        if self.copied is None:
            self.give_gradients()
        copies = (c for group in self.optim.param_groups for c in group["params"])
        return clip_grad_norm_(copies, max_norm, norm_type=norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or make them zeros."""
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
            # A scheduler has changed the learning rate here.
            inner.update({k: v for k, v in group.items() if k != "params"})
        self._check_gradients()
        self._take_changes()
        self.optim.step()
        for group, inner in self._groups():
            for parameter, copy in zip(group["params"], inner["params"], strict=True):
                if copy.grad is not None:
                    parameter.copy_(copy)
                    copy.grad = None
                    self.state[parameter].update(self.optim.state[copy])
        self.copied = None
        return loss

    def _take_changes(self) -> None:
        """Let copies have the numbers that parameters have got from outside."""
        for group, inner in self._groups():
            for parameter, copy in zip(group["params"], inner["params"], strict=True):
                same = parameter == copy.to(parameter.dtype)
                if not same.all():
                    copy.copy_(torch.where(same, copy, parameter.to(copy.dtype)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state. (PyTorch's own would round it to the parameters'.)"""
        given = dict(state_dict)
        states, given["state"] = given["state"], {}
        super().load_state_dict(given)
        order = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in given["param_groups"] for n in group["params"]]
        copies = [c for group in self.optim.param_groups for c in group["params"]]
        for number, parameter, copy in zip(numbers, order, copies, strict=True):
            for name, value in states.get(number, {}).items():
                if name == MASTER:
                    with torch.no_grad():
                        copy.copy_(value)
                        parameter.copy_(value)
                else:
                    like = getattr(value, "shape", None) == copy.shape  # no count
                    own = value.to(copy.device, copy=True) if like else deepcopy(value)
                    self.optim.state[copy][name] = own
            self.state[parameter] = {MASTER: copy, **self.optim.state[copy]}
