"""`LocalSGD` and `DiLoCo`: the full classes, `local` with parts.

The parts compare the ranks before anything is sent, watch frozen parameters, make loss
scalers agree on all ranks, and explain the error when a rank is lost. Chapter 14.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ddp_course.local_sgd.local import AllReduce, Group, LocalSteps, OuterSteps
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.frozen import Frozen
from ddp_course.mechanisms.replicable import check_module, form_of
from ddp_course.theory.checks import check_not_negative, check_positive


class NotAveragedError(RuntimeError):
    """An error: the average failed. This rank's own parameters are unchanged."""


class LocalSGD(LocalSteps):
    """An optimizer with local steps, which averages the ranks after every H steps.

        optimizer = LocalSGD(AdamW(model.parameters()), model, every=8)

    The arguments are those of `LocalSteps`, except `parts`. Raises ValueError for an
    argument out of its range; ReplicaError, on every rank, if the ranks differ, or if a
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
        check_module_argument("LocalSGD", module)
        parts = parts_of(every=every, warmup=warmup)
        options = {"warmup": warmup, "group": group, "all_reduce": all_reduce}
        super().__init__(optimizer, module, every, **options, parts=parts)


class DiLoCo(OuterSteps):
    """Local SGD with an outer optimizer.

    The arguments are those of `LocalSGD`, and the outer lr and momentum of
    `OuterSteps`; the errors are those of `LocalSGD`. Chapter 14.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        every: int = 8,
        *,
        lr: float = 0.7,
        momentum: float = 0.9,
        warmup: int = 0,
        group: Group = None,
        all_reduce: AllReduce = dist.all_reduce,
    ) -> None:
        check_module_argument("DiLoCo", module)
        check_positive("lr", lr)
        check_not_negative("momentum", momentum)
        if momentum >= 1:
            raise ValueError(f"momentum is {momentum!r}; it must be below 1")
        outer = {"lr": lr, "momentum": momentum}
        parts = parts_of(every=every, warmup=warmup, **outer)
        options = {"warmup": warmup, "group": group, "all_reduce": all_reduce}
        super().__init__(optimizer, module, every, **options, **outer, parts=parts)


def check_module_argument(name: str, module: nn.Module) -> None:
    """Raise ValueError if the class `name` got something else than a module."""
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"module is of type {type(module).__name__}; it must be a torch.nn.Module: "
            f"{name}(optimizer, module)"
        )


# ---- parts ---------------------------------------------------------------------------


def parts_of(*, every: int, warmup: int, **outer: Any) -> list[Any]:
    """Return the parts; raise ValueError for an argument out of its range."""
    for name, value, least in (("every", every, 1), ("warmup", warmup, 0)):
        if type(value) is not int or value < least:
            must = f"it must be a whole number, {least} or more"
            raise ValueError(f"{name} is {value!r}; {must}")
    return [
        SameReplicas(every=every, warmup=warmup, **outer),
        StaysFrozen(),
        AgreedScaler(),
        AverageErrors(),
    ]


class SameReplicas:
    """A part that compares modules and `form` on all ranks before anything is sent."""

    def __init__(self, **form: Any) -> None:
        self.form = form

    def constructed(self, local: LocalSteps) -> None:
        """Raise ReplicaError, on every rank, if the ranks differ or cannot train."""
        if dist.is_initialized():
            form = form_of(local.module, **self.form)
            agreed(lambda: check_local(local), local.group, **form)


def check_local(local: LocalSteps) -> None:
    """Raise ValueError if parameters or gradients of this rank are never averaged."""
    check_module(local.module)
    known = set(local.trained)
    stepped = (p for group in local.param_groups for p in group["params"])
    if any(p.requires_grad and p not in known for p in stepped):
        raise ValueError(
            "the optimizer has a parameter that is not in the module; pass the module "
            "that has all of the optimizer's parameters"
        )
    averages = hasattr(local.module, "require_backward_grad_sync")
    if local.warmup and not averages:
        raise ValueError(
            f"warmup is {local.warmup}, so the module must be a "
            f"DistributedDataParallel, which averages gradients; it is a "
            f"{type(local.module).__name__}: wrap it, or leave warmup out"
        )


class StaysFrozen:
    """A part that raises if parameters are frozen, unfrozen or replaced later."""

    def constructed(self, local: LocalSteps) -> None:
        """Record which parameters are trained."""
        self.frozen = Frozen(local.module)

    def before_step(self, local: LocalSteps) -> None:
        """Raise RuntimeError if other parameters are trained than at construction."""
        self.frozen.check()


class AgreedScaler:
    """A part that makes torch.amp.GradScaler skip a step on all ranks or on none.

    Otherwise the ranks' counts of steps would differ, and the ranks would average at
    different times.
    """

    def constructed(self, local: LocalSteps) -> None:
        """Set `groups`, over which a GradScaler's decisions agree (`guards`)."""
        if dist.is_initialized():
            local.groups = (local.group,)


class AverageErrors:
    """A part that turns a failed average into an error that says what to do."""

    def not_averaged(self, local: LocalSteps, error: RuntimeError) -> None:
        """Raise NotAveragedError from the error of the collective."""
        raise NotAveragedError(
            f"the ranks could not be averaged after step {local.steps}: a rank has "
            "ended, or is late. This rank's own parameters are unchanged: save them, "
            f"or go on from a checkpoint ({error})"
        ) from error
