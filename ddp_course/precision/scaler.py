"""Loss scaling: gradients that float16 would lose, made larger for a while.

float16 has nothing between 0 and 6e-8, and many gradients are smaller. Backward is
linear: of a loss that is S times as large, every gradient is S times as large, those on
the way, too. So

    scale      multiply the loss by S, then backward
    unscale    divide the gradients by S, in float32; is any inf or nan?
    step       only if none is
    update     after an inf or nan S was too large: halve it; after many steps without,
               perhaps it can be larger: double it

Whether to step is one decision of *all* ranks that have parts of the model. If each
took its own, the rank with the inf would stay where it is, and the others go on.

Micikevicius et al. 2018, "Mixed Precision Training", section 3.2;
torch/amp/grad_scaler.py. bfloat16 has the exponents of float32, and needs none of it.
Chapter 12.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.mechanisms.guards import seen_by_all


class GradScaler:
    """Multiplies losses, divides gradients, and leaves out steps with inf or nan.

        scaler = GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)               # before gradients are clipped
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    (The gradients of `MasterWeights` are clipped by its own `clip_grad_norm_`.)

    Args:
        init_scale: S at first.
        growth_factor, backoff_factor: what S is multiplied by.
        growth_interval: after so many steps in a row without inf or nan S grows.
        enabled: False for one that changes nothing, as in other precisions.

    Raises ValueError for factors that would not grow and shrink, RuntimeError for calls
    in another order. As torch.amp.GradScaler, also with parameters, gradients or states
    in shards: then all ranks call it together.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        for name, value, fits in (
            ("init_scale", init_scale, init_scale > 0),
            ("growth_factor", growth_factor, growth_factor > 1),
            ("backoff_factor", backoff_factor, 0 < backoff_factor < 1),
            ("growth_interval", growth_interval, growth_interval >= 1),
        ):
            if not fits:
                raise ValueError(
                    f"{name} is {value!r}; init_scale must be above 0, growth_factor "
                    "above 1, backoff_factor between 0 and 1, growth_interval 1 or more"
                )
        self.enabled, self.factor = enabled, float(init_scale) if enabled else 1.0
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval, self.clean_steps = growth_interval, 0
        self.skipped: dict[Optimizer, bool] = {}  # those unscaled since the last update

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """Return a loss, or a list or tuple of outputs, S times as large."""
        if not self.enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * self.factor
        return type(outputs)(map(self.scale, outputs))

    def get_scale(self) -> float:
        """Return S; 1.0 if this is not enabled."""
        return self.factor

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by S; once for each step, by all ranks together."""
        if not self.enabled:
            return
        if optimizer in self.skipped:
            raise RuntimeError(
                "unscale_ was called already for this optimizer since the last "
                "update(): its gradients would be divided twice"
            )
        inner = getattr(optimizer, "unscaled", optimizer)  # what has the gradients
        found = [
            self._unscale(p.grad)
            for group in inner.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        own = torch.stack(found).isnan().any().float() if found else None
        self.skipped[optimizer] = bool(seen_by_all(optimizer, own))

    def _unscale(self, gradient: Tensor) -> Tensor:
        """Divide in place; return nan if there is inf or nan, else 0.0."""
        if gradient.dtype is torch.float16:
            raise ValueError(
                "a gradient is torch.float16: divided, it could be lost again. Keep "
                "parameters in float32 (autocast), or step MasterWeights"
            )
        gradient.mul_(1 / self.factor)
        # 0 * inf is nan. Of a million gradients, with one thread, dividing and looking
        # take 0.9 ms; by isfinite 3.2, all in one tensor 9, and in PyTorch's own kernel
        # (torch._amp_foreach_non_finite_check_and_unscale_) 0.3, of a step of 150.
        return (gradient * 0).sum().float()

    def step(self, optimizer: Optimizer) -> None:
        """Call `optimizer.step()`, unless a gradient of some rank is inf or nan."""
        if optimizer not in self.skipped:
            self.unscale_(optimizer)
        if not self.skipped.get(optimizer):
            optimizer.step()

    def update(self) -> None:
        """Choose S for the next step."""
        if not self.enabled:
            return
        if not self.skipped:
            raise RuntimeError("update() is for after step(optimizer): there was none")
        if any(self.skipped.values()):
            self.factor, self.clean_steps = self.factor * self.backoff_factor, 0
        else:
            self.clean_steps += 1
            if self.clean_steps == self.growth_interval:
                self.factor, self.clean_steps = self.factor * self.growth_factor, 0
        self.skipped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return S and its settings, as PyTorch's; {} if this is not enabled."""
        if not self.enabled:
            return {}
        return {
            "scale": self.factor,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self.clean_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of this class or of PyTorch's."""
        if not self.enabled:
            return
        if not state:
            raise RuntimeError(
                "the state is empty, as of a scaler that is not enabled; this one is"
            )
        self.factor, self.clean_steps = state["scale"], state["_growth_tracker"]
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
