"""Local SGD: H steps alone, then the mean of the parameters; and what grew out of it.

Data parallelism averages gradients in every step. Here every rank steps with its own,
and after H steps the ranks take the mean of where they are: the bytes of one all-reduce
in H steps. In between the replicas are none, they *drift* apart.

With SGD and H = 1 it is the same, but for rounding. A step is linear in the gradients,
with momentum, too: the mean of the steps is the step of the mean. Adam's is not, which
divides by a root. And what an optimizer remembers stays each rank's own: to average it,
too, would send twice or three times as much.

    train_locally   the loop, whole
    LocalSGD        the same around any optimizer; post-local SGD is a DDP at first
    DiLoCo          from the mean not its place is taken, but its direction

Sources: Stich 2018, arXiv:1805.09767; post-local: Lin et al. 2018, arXiv:1808.07217;
Douillard et al. 2023, arXiv:2311.08105 (DiLoCo). In PyTorch:
torch.distributed.algorithms.model_averaging. Chapter 14.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ddp_course.collectives import communicator
from ddp_course.mechanisms.agreement import start_as_replicas
from ddp_course.mechanisms.frozen import Frozen

Group = dist.ProcessGroup | None
AllReduce = Callable[..., Any]


def train_locally(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[nn.Module, int], Tensor],
    steps: int,
    every: int,
) -> None:
    """Train on this rank's rows, `loss(model, step)`; meet after each `every` steps."""
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()  # with this rank's gradient alone
        if (step + 1) % every == 0:
            average_parameters(model.parameters())


@torch.no_grad()
def average_parameters(
    parameters: Iterable[Tensor],
    group: Group = None,
    all_reduce: AllReduce = dist.all_reduce,
) -> None:
    """Replace each by its mean over the ranks, in place; called by all of them."""
    own = list(parameters)
    for parameter, mean in zip(own, means(own, group, all_reduce), strict=True):
        parameter.copy_(mean)


@torch.no_grad()
def means(
    tensors: Sequence[Tensor],
    group: Group = None,
    all_reduce: AllReduce = dist.all_reduce,
) -> list[Tensor]:
    """Return the mean of each over the ranks: one all-reduce for each type.

    The tensors stay as they are. Without a process group it is this process's.
    """
    found: dict[int, Tensor] = {}
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        places = [k for k, t in enumerate(tensors) if (t.dtype, t.device) == kind]
        flat = torch.cat([tensors[k].detach().flatten() for k in places])
        if dist.is_initialized():
            all_reduce(flat, group=group)
            flat /= dist.get_world_size(group)
        parts = flat.split([tensors[k].numel() for k in places])
        found |= zip(places, parts, strict=True)
    return [found[k].view(t.shape) for k, t in enumerate(tensors)]


def distance(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the 2-norm of the difference of all, taken as one long vector."""
    pairs = zip(tensors, others, strict=True)
    squares = [((a.detach().double() - b.double()) ** 2).sum() for a, b in pairs]
    return float(sum(squares)) ** 0.5


def drift(
    module: nn.Module, group: Group = None, all_reduce: AllReduce = dist.all_reduce
) -> list[float]:
    """Return, for each rank, how far its trained parameters are from all ranks' mean.

    Called by all ranks together; it sends as much as an average. Chapter 14.
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    own = distance(trained, means(trained, group, all_reduce))
    return communicator(group).exchange(own) if dist.is_initialized() else [own]


class NotAveragedError(RuntimeError):
    """The ranks could not meet; what this one has learnt alone is still there."""


class LocalSGD:
    """An optimizer that steps alone, and takes the ranks' mean after every H steps.

        optimizer = LocalSGD(AdamW(model.parameters()), model, every=8)

    Averaged are trained parameters, and floating-point buffers, such as BatchNorm's
    means. Frozen parameters, counters and the states of `optimizer` are not sent.

    Args:
        optimizer: of parameters of `module`; any of PyTorch's.
        module: the same on all ranks; rank 0's numbers are taken.
        every: H, steps from one average to the next.
        warmup: post-local SGD: so many steps are to be data parallelism at first.
            `module` is then a DistributedDataParallel, the course's or PyTorch's, whose
            averaging is turned off after them.
        group: the ranks; None are all. Without a process group: one process.
        all_reduce: any of this course, or PyTorch's.

    `steps` are those that were made. Raises ValueError for numbers that cannot be;
    ReplicaError, on every rank, if the ranks differ, or if a parameter of `optimizer`
    is none of the module's. Chapter 14.
    """

    told: Mapping[str, Any] = MappingProxyType({})  # to be the same on all ranks, too

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        every: int = 8,
        *,
        warmup: int = 0,
        group: Group = None,
        all_reduce: AllReduce = dist.all_reduce,
    ) -> None:
        for name, value, least in (("every", every, 1), ("warmup", warmup, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} is {value!r}; it must be {least} or more")
        self.optimizer, self.module = optimizer, module
        self.every, self.warmup, self.steps = every, warmup, 0
        self.group, self.all_reduce = group, all_reduce
        self.trained = [p for p in module.parameters() if p.requires_grad]
        if dist.is_initialized():
            told = {"every": every, "warmup": warmup, **self.told}
            start_as_replicas(module, group, self._problem(), **told)
            self.groups = (group,)  # a scaler asks whether any of them has an inf
        self.frozen = Frozen(module)
        self._share_gradients()

    def _problem(self) -> str | None:
        """Return what would never be averaged, or None."""
        known = set(self.trained)
        stepped = (p for group in self.param_groups for p in group["params"])
        if any(p.requires_grad and p not in known for p in stepped):
            return "the optimizer has a parameter that is none of the module's"
        if self.warmup and not hasattr(self.module, "require_backward_grad_sync"):
            return (
                f"warmup is {self.warmup}, and nobody averages gradients: the module "
                f"must be a DistributedDataParallel, and is a {type(self.module)}"
            )
        return None

    def _share_gradients(self) -> None:
        """Let a DDP average gradients in the warm-up, and not afterwards."""
        if hasattr(self.module, "require_backward_grad_sync"):
            self.module.require_backward_grad_sync = self.steps < self.warmup

    def step(self) -> None:
        """Step with this rank's gradients; then average, if it is time."""
        if self.step_alone():
            self.average()

    def step_alone(self) -> bool:
        """Step with this rank's gradients; tell whether the ranks are to meet now."""
        self.frozen.check()
        self.optimizer.step()
        self.steps += 1
        alone = self.steps - self.warmup
        if alone == 0:
            self._share_gradients()
            self.begin()
        return alone > 0 and alone % self.every == 0

    def begin(self) -> None:
        """Begin to step alone; all ranks are at the same place."""

    def average(self) -> None:
        """Meet the other ranks, which all call this. Raises NotAveragedError."""
        try:
            mean = means(self.place(), self.group, self.all_reduce)
        except RuntimeError as error:
            raise NotAveragedError(
                f"the ranks could not be averaged after step {self.steps}: a rank is "
                "gone, or late. This one's parameters are its own, as they were: save "
                f"them, or go on from a checkpoint ({error})"
            ) from error
        self.meet(mean)

    def place(self) -> list[Tensor]:
        """Return what is averaged."""
        return [*self.trained, *filter(torch.is_floating_point, self.module.buffers())]

    @torch.no_grad()
    def meet(self, mean: list[Tensor]) -> None:
        """Go on from the mean of all ranks' places."""
        for own, value in zip(self.place(), mean, strict=True):
            own.copy_(value)

    # ---- as any optimizer ------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a new gradient."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on; every rank has its own."""
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with the parameters that this rank had then."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = state["steps"]
        self._share_gradients()


class DiLoCo(LocalSGD):
    """Local SGD whose mean is a direction: an outer optimizer goes there, or further.

    From the last common point to the mean is a step that all ranks have made together.
    Its negative is taken for a gradient, by SGD with Nesterov momentum:

        gradient = common point - mean;  common point <- outer step;  all go on there

    With lr 1 and no momentum it is local SGD, but for rounding: a - (a - b) is b, if b
    lies between a/2 and 2a, and nearly b otherwise.

    Args:
        lr, momentum, nesterov: of the outer SGD; those of the paper. The inner
            optimizer there is AdamW. All others are LocalSGD's.

    Chapter 14.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        every: int = 8,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        nesterov: bool = True,
        **options: Any,
    ) -> None:
        nesterov = nesterov and momentum > 0
        self.told = {"lr": lr, "momentum": momentum, "nesterov": nesterov}
        super().__init__(optimizer, module, every, **options)
        self.common = [p.detach().clone() for p in self.trained]
        self.outer = SGD(self.common, **self.told)

    @torch.no_grad()
    def begin(self) -> None:
        """Begin to step alone: this is the first common point."""
        for common, own in zip(self.common, self.trained, strict=True):
            common.copy_(own)

    @torch.no_grad()
    def meet(self, mean: list[Tensor]) -> None:
        """Step from the last common point towards the mean; buffers take theirs."""
        count = len(self.common)
        for common, value in zip(self.common, mean[:count], strict=True):
            common.grad = common - value
        self.outer.step()
        super().meet([*self.common, *mean[count:]])

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on: also between two averages."""
        outer = {"common": self.common, "outer": self.outer.state_dict()}
        return super().state_dict() | outer

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self.outer.load_state_dict(state["outer"])
        for common, value in zip(self.common, state["common"], strict=True):
            common.copy_(value)
