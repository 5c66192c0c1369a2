"""Loss scaling: multiply small gradients during backward, so that float16 keeps them.

float16 has no number between 0 and 6e-8, and many gradients are smaller. Backward is
linear: if the loss is multiplied by S, so is every gradient, also those between layers.
So

    scale      multiply the loss by S, then run backward
    unscale    divide the gradients by S, in float32; check for inf and nan
    step       only if no gradient has inf or nan
    update     after an inf or nan, S was too large: halve it; after many steps without
               inf or nan, try a larger S: double it

*All* ranks that have parts of the model must decide together whether to step. If each
rank decided alone, the rank with the inf would skip the step, and the others would not.

Micikevicius et al. 2018, "Mixed Precision Training", section 3.2;
torch/amp/grad_scaler.py. bfloat16 has the range of float32, and needs no loss scaling.
Chapter 12.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.mechanisms.guards import seen_by_all


class GradScaler:
    """A scaler that multiplies the loss by S, and skips steps with inf or nan.

        scaler = GradScaler()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)               # before gradients are clipped
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    (The gradients of `MasterWeights` are clipped by its own `clip_grad_norm_`.)

    Args:
        init_scale: the first S.
        growth_factor, backoff_factor: the factors by which S grows and shrinks.
        growth_interval: S grows after this many steps in a row without inf or nan.
        enabled: False for a scaler that does nothing, for other precisions.

    Raises ValueError for factors that would not make S grow or shrink, RuntimeError for
    calls in another order, and for a loss that was never scaled. It is used like
    torch.amp.GradScaler, but parameters, gradients or states may be sharded, too; then
    all ranks call its methods together.
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
        self.in_use = False  # whether a loss was scaled, or S was returned to scale one
        # {optimizer unscaled since the last update: whether its step is skipped}
        self.skipped: dict[Optimizer, bool] = {}

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """Return a loss, or a list or tuple of outputs, multiplied by S."""
        if not self.enabled:
            return outputs
        self.in_use = True
        if isinstance(outputs, Tensor):
            return outputs * self.factor
        return type(outputs)(map(self.scale, outputs))

    def get_scale(self) -> float:
        """Return S, as for `pipeline.step`; 1.0 if the scaler is not enabled."""
        self.in_use = True
        return self.factor

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by S; all ranks call it together, once for each step."""
        if not self.enabled:
            return
        if not self.in_use:
            raise RuntimeError(
                f"no loss was scaled, and the gradients would be divided by "
                f"{self.factor:g}: call scaler.scale(loss).backward() before "
                "unscale_(optimizer) or step(optimizer)"
            )
        if optimizer in self.skipped:
            raise RuntimeError(
                "unscale_ was called twice for this optimizer since the last update(): "
                "its gradients would be divided twice; call it once for each step"
            )
        inner = getattr(optimizer, "unscaled", optimizer)  # MasterWeights has one
        found = [
            self._unscale(p.grad)
            for group in inner.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        own = torch.stack(found).isnan().any().float() if found else None
        self.skipped[optimizer] = bool(seen_by_all(optimizer, own))

    def _unscale(self, gradient: Tensor) -> Tensor:
        """Divide a gradient in place; return nan if it has inf or nan, else 0.0."""
        if gradient.dtype is torch.float16:
            raise ValueError(
                "a gradient is torch.float16; when it is divided, it could become 0. "
                "Keep parameters in float32 (autocast), or use MasterWeights"
            )
        gradient.mul_(1 / self.factor)
        # 0 * inf is nan. For a million gradients and one thread, this and the division
        # take 0.9 ms; with isfinite 3.2 ms, after a copy into one flat tensor 9 ms, and
        # with PyTorch's kernel (torch._amp_foreach_non_finite_check_and_unscale_)
        # 0.3 ms. A step takes 150 ms.
        return (gradient * 0).sum().float()

    def step(self, optimizer: Optimizer) -> None:
        """Call `optimizer.step()`, unless a gradient on any rank is inf or nan."""
        if optimizer not in self.skipped:
            self.unscale_(optimizer)
        if not self.skipped.get(optimizer):
            optimizer.step()

    def update(self) -> None:
        """Shrink S after an inf or nan; grow it after enough clean steps."""
        if not self.enabled:
            return
        if not self.skipped:
            raise RuntimeError(
                "update() was called before step(optimizer); call step first"
            )
        if any(self.skipped.values()):
            self.factor, self.clean_steps = self.factor * self.backoff_factor, 0
        else:
            self.clean_steps += 1
            if self.clean_steps == self.growth_interval:
                self.factor, self.clean_steps = self.factor * self.growth_factor, 0
        self.skipped.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return S and its settings in PyTorch's format; {} if not enabled."""
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
        """Load a state of this class or of PyTorch's."""
        if not self.enabled:
            return
        if not state:
            raise RuntimeError(
                "the state is empty: it is of a scaler that was not enabled; load it "
                "into GradScaler(enabled=False)"
            )
        self.factor, self.clean_steps = state["scale"], state["_growth_tracker"]
        self.growth_factor = state["growth_factor"]
        self.backoff_factor = state["backoff_factor"]
        self.growth_interval = state["growth_interval"]
