"""Local SGD and DiLoCo: H steps with a rank's own gradients, then an average.

Data parallelism averages gradients in every step. Here every rank steps with its own
gradient, and after H steps the ranks average their parameters: they send the bytes of
one all-reduce in H steps. Between two averages, their parameters *drift* apart.

With SGD and H = 1 the result equals data parallelism's, up to rounding. A step is
linear in the gradients, also with momentum: the mean of the steps is the step of the
mean. Adam's step is not linear, because it divides by a root. The ranks do not average
the optimizer's states: that would send two or three times as many bytes.

    LocalSteps   wraps any optimizer; post-local SGD begins with a DDP
    OuterSteps   DiLoCo: the mean is not the next point, but gives the direction to it

Both call these methods of their `parts` (`local_sgd.LocalSGD` and `DiLoCo` have some),
and pass themselves as the argument:

    constructed    before anything is sent
    before_step    before the optimizer steps
    not_averaged   an average failed; the error is the second argument

Sources: Stich 2018, arXiv:1805.09767; post-local: Lin et al. 2018, arXiv:1808.07217;
Douillard et al. 2023, arXiv:2311.08105 (DiLoCo). In PyTorch:
torch.distributed.algorithms.model_averaging. Chapter 14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddp_course.mechanisms.broadcast import broadcast_all
from ddp_course.mechanisms.parts import announce
from ddp_course.mechanisms.states import PerRankStates

Group = dist.ProcessGroup | None
AllReduce = Callable[..., Any]


@torch.no_grad()
def means(
    tensors: Sequence[Tensor],
    group: Group = None,
    all_reduce: AllReduce = dist.all_reduce,
) -> list[Tensor]:
    """Return the mean of each tensor over the ranks: one all-reduce for each type.

    It does not change the tensors. Without a process group it returns copies of them.
    """
    results: dict[int, Tensor] = {}
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        places = [k for k, t in enumerate(tensors) if (t.dtype, t.device) == kind]
        flat = torch.cat([tensors[k].detach().flatten() for k in places])
        if dist.is_initialized():
            all_reduce(flat, group=group)
            flat /= dist.get_world_size(group)
        parts = flat.split([tensors[k].numel() for k in places])
        results |= zip(places, parts, strict=True)
    return [results[k].view(t.shape) for k, t in enumerate(tensors)]


class LocalSteps:
    """An optimizer with local steps, which averages the ranks after every H steps.

    It averages trained parameters and floating-point buffers, such as BatchNorm's
    means. Frozen parameters, counters and the states of `optimizer` are not sent.

    Args:
        optimizer: any of PyTorch's, over parameters of `module`.
        module: the same on all ranks; all get rank 0's values.
        every: H, the number of steps from one average to the next.
        warmup: post-local SGD: the number of first steps that average gradients.
            `module` must then be a DistributedDataParallel, the course's or PyTorch's,
            which stops averaging after these steps.
        group: the ranks; None means all. Without a process group, this process trains
            alone.
        all_reduce: any all-reduce of this course, or PyTorch's.
        parts: objects with some of the methods that the module's docstring lists.

    Attributes:
        steps: the number of steps so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        every: int = 8,
        *,
        warmup: int = 0,
        group: Group = None,
        all_reduce: AllReduce = dist.all_reduce,
        parts: Sequence[Any] = (),
    ) -> None:
        self.optimizer, self.module, self.parts = optimizer, module, parts
        self.every, self.warmup, self.steps = every, warmup, 0
        self.group, self.all_reduce = group, all_reduce
        self.trained = [p for p in module.parameters() if p.requires_grad]
        announce(parts, "constructed", self)
        if dist.is_initialized():
            first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
            broadcast_all([*module.parameters(), *module.buffers()], first, group)
        self._share_gradients()

    def _share_gradients(self) -> None:
        """Enable a DDP's averaging in the warm-up, and disable it afterwards."""
        if hasattr(self.module, "require_backward_grad_sync"):
            self.module.require_backward_grad_sync = self.steps < self.warmup

    def step(self) -> None:
        """Step with this rank's gradients; average after every H steps."""
        if self.step_alone():
            self.average()

    def step_alone(self) -> bool:
        """Step with this rank's gradients; return whether an average is due now."""
        announce(self.parts, "before_step", self)
        self.optimizer.step()
        self.steps += 1
        local = self.steps - self.warmup
        if local == 0:
            self._share_gradients()
            self.begin()
        return local > 0 and local % self.every == 0

    def begin(self) -> None:
        """Begin local steps; at this time all ranks have the same parameters."""

    def average(self) -> None:
        """Average the tensors of all ranks; all ranks must call it."""
        try:
            mean = means(self.averaged_tensors(), self.group, self.all_reduce)
        except RuntimeError as error:
            announce(self.parts, "not_averaged", self, error)
            raise
        self.apply_mean(mean)

    def averaged_tensors(self) -> list[Tensor]:
        """Return the tensors to average: trained parameters and floating buffers."""
        return [*self.trained, *filter(torch.is_floating_point, self.module.buffers())]

    @torch.no_grad()
    def apply_mean(self, mean: list[Tensor]) -> None:
        """Copy the mean of all ranks into this rank's tensors."""
        for own, value in zip(self.averaged_tensors(), mean, strict=True):
            own.copy_(value)

    # ---- methods of an optimizer -----------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the inner optimizer."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state; every rank has its own."""
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def whole_states(self, model: nn.Module) -> tuple[PerRankStates, PerRankStates]:
        """Return the states of all ranks' models, and of all ranks' optimizers."""
        return PerRankStates(model), PerRankStates(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state`; the module must have this rank's parameters of that time."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        self._share_gradients()


class OuterSteps(LocalSteps):
    """DiLoCo: local steps with an outer optimizer that steps towards the mean.

    The difference between the last common point and the mean serves as the gradient of
    an outer SGD with Nesterov momentum:

        gradient = common point - mean
        common point <- outer step with this gradient; all ranks go on from there

    With lr 1 and no momentum this is local SGD, up to rounding: a - (a - b) is b if b
    is between a/2 and 2a, and nearly b otherwise.

    Args:
        lr, momentum: arguments of the outer SGD, by default the paper's. The paper's
            inner optimizer is AdamW.
        all others: as in `LocalSteps`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        every: int = 8,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        **options: Any,
    ) -> None:
        super().__init__(optimizer, module, every, **options)
        self.common = [p.detach().clone() for p in self.trained]
        outer = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
        self.outer = SGD(self.common, **outer)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin local steps: the present parameters are the first common point."""
        for common, own in zip(self.common, self.trained, strict=True):
            common.copy_(own)

    @torch.no_grad()
    def apply_mean(self, mean: list[Tensor]) -> None:
        """Step from the last common point towards the mean; set buffers to the mean."""
        count = len(self.common)
        for common, value in zip(self.common, mean[:count], strict=True):
            common.grad = common - value
        self.outer.step()
        super().apply_mean([*self.common, *mean[count:]])

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, with the common point and the outer SGD's state."""
        outer = {"common": self.common, "outer": self.outer.state_dict()}
        return super().state_dict() | outer

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state`."""
        super().load_state_dict(state)
        self.outer.load_state_dict(state["outer"])
        for common, value in zip(self.common, state["common"], strict=True):
            common.copy_(value)
