"""`LocalSGD` and `DiLoCo`: the steps of `local`, with the parts of real trainings.

The parts compare the ranks before anything is sent, watch frozen parameters, let a loss
scaler agree on all ranks, and say what to do when a rank is gone. Chapter 14.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ddp_course.local_sgd.local import AllReduce, Group, LocalSteps, OuterSteps
from ddp_course.mechanisms.agreement import agreed, check_module, form_of
from ddp_course.mechanisms.frozen import Frozen
from ddp_course.mechanisms.guards import watch


class NotAveragedError(RuntimeError):
    """The ranks could not be averaged; this rank's own parameters are still there."""


class LocalSGD(LocalSteps):
    """An optimizer that steps alone, and takes the ranks' mean after every H steps.

        optimizer = LocalSGD(AdamW(model.parameters()), model, every=8)

    The arguments are those of `LocalSteps`, but for `parts`. Raises ValueError for
    impossible numbers; ReplicaError, on every rank, if the ranks differ, or if a
    parameter of `optimizer` is not one of the module's; and NotAveragedError if an
    average fails. Chapter 14.
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
    ) -> None:
        parts = parts_of(every=every, warmup=warmup)
        how = {"warmup": warmup, "group": group, "all_reduce": all_reduce}
        super().__init__(optimizer, module, every, **how, parts=parts)


class DiLoCo(OuterSteps):
    """Local SGD with an outer optimizer; arguments and errors as `LocalSGD`'s.

    And the arguments of `OuterSteps`: the outer lr, momentum and nesterov. Chapter 14.
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
        **outer: Any,
    ) -> None:
        parts = parts_of(every=every, warmup=warmup, **outer)
        how = {"warmup": warmup, "group": group, "all_reduce": all_reduce}
        super().__init__(optimizer, module, every, **how, **outer, parts=parts)


# ---- parts ---------------------------------------------------------------------------


def parts_of(*, every: int, warmup: int, **outer: Any) -> list[Any]:
    """Return the parts of a real training; raise ValueError for impossible numbers."""
    for name, value, least in (("every", every, 1), ("warmup", warmup, 0)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}; it must be {least} or more")
    return [
        SameStart(every=every, warmup=warmup, **outer),
        StaysFrozen(),
        AgreedScaler(),
        Explained(),
    ]


class SameStart:
    """Compare modules and `form` on all ranks before anything is sent."""

    def __init__(self, **form: Any) -> None:
        self.form = form

    def constructed(self, local: LocalSteps) -> None:
        """Raise ReplicaError, on every rank, if the ranks differ or cannot train."""
        if dist.is_initialized():
            form = form_of(local.module, **self.form)
            agreed(lambda: check_local(local), local.group, **form)


def check_local(local: LocalSteps) -> None:
    """Raise ValueError if something of this rank's would never be averaged."""
    check_module(local.module)
    known = set(local.trained)
    stepped = (p for group in local.param_groups for p in group["params"])
    if any(p.requires_grad and p not in known for p in stepped):
        raise ValueError("the optimizer has a parameter that is none of the module's")
    averages = hasattr(local.module, "require_backward_grad_sync")
    if local.warmup and not averages:
        raise ValueError(
            f"warmup is {local.warmup}, and nobody averages gradients: the module "
            f"must be a DistributedDataParallel, and is a {type(local.module)}"
        )


class StaysFrozen:
    """Raise before a step if parameters were frozen, trained or exchanged meanwhile."""

    def constructed(self, local: LocalSteps) -> None:
        """Remember which parameters are trained."""
        self.frozen = Frozen(local.module)

    def before_step(self, local: LocalSteps) -> None:
        """Raise RuntimeError if that has changed."""
        self.frozen.check()


class AgreedScaler:
    """Let torch.amp.GradScaler skip a step on all ranks, if one of them has an inf.

    Otherwise the ranks would count different steps, and average different ones.
    """

    def constructed(self, local: LocalSteps) -> None:
        """Watch scalers; they ask an optimizer for its `groups`."""
        if dist.is_initialized():
            local.groups = (local.group,)
            watch()


class Explained:
    """Say what a failed average leaves behind."""

    def not_averaged(self, local: LocalSteps, error: RuntimeError) -> None:
        """Raise NotAveragedError from the error of the collective."""
        raise NotAveragedError(
            f"the ranks could not be averaged after step {local.steps}: a rank is "
            "gone, or late. This one's parameters are its own, as they were: save "
            f"them, or go on from a checkpoint ({error})"
        ) from error
