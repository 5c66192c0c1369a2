"""Before an optimizer is made: do all ranks mean the same, and can it be done?

Parameters that differ between the ranks would be added to each other, or hang. So what
each rank was given is compared first, and whatever is wrong on one rank, every rank
raises the same `ReplicaError`; nothing has been sent by then. Chapter 07.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import Form, check_same
from ddp_course.zero.elementwise import element_states
from ddp_course.zero.states import options_of


@dataclass(frozen=True)
class Agreed:
    """The arguments of an optimizer, as all ranks understand them.

    Attributes:
        groups: parameter groups with all options filled in, as PyTorch keeps them.
        defaults: the options of the optimizer.
        element_states: names of the states with a number per element (`elementwise`);
            none if the optimizer is only given whole tensors.
    """

    groups: list[dict[str, Any]]
    defaults: dict[str, Any]
    element_states: frozenset[str]


def agree(
    params: Iterable[Any],
    optimizer_class: Callable[..., Optimizer],
    defaults: dict[str, Any],
    group: dist.ProcessGroup | None,
    *,
    in_parts: bool,
    problem: str | None = None,
    **options: Any,
) -> Agreed:
    """Return what all ranks agree on; a collective call, which sends no tensor.

    Args:
        params, optimizer_class, defaults: as ZeroRedundancyOptimizer takes them.
        group: the ranks.
        in_parts: the optimizer must be able to step parts of tensors.
        problem: what this rank has found to be wrong already.
        options: more that must be the same on all ranks.

    Raises ReplicaError, with the same text on every rank. Chapter 07.
    """
    form: Form = {f"argument {name}": repr(value) for name, value in options.items()}
    agreed = Agreed([], {}, frozenset())
    try:
        if not problem:
            groups = Optimizer(params, {}).param_groups  # PyTorch's own checks
            problem = _problem_with(groups)
        if not problem:
            agreed = _understood(groups, optimizer_class, defaults, in_parts)
            form |= _form_of(agreed.groups)
    except Exception as error:  # whatever it is, the other ranks must not wait
        problem = f"{error}" if isinstance(error, ValueError) else repr(error)
    check_same(form, problem, group)
    return agreed


def _understood(
    groups: list[dict[str, Any]],
    optimizer_class: Callable[..., Optimizer],
    defaults: dict[str, Any],
    in_parts: bool,
) -> Agreed:
    """Fill in the options of every group, as the optimizer itself does it."""
    stand_ins = [
        {**group, "params": [_without_elements(p) for p in group["params"]]}
        for group in groups
    ]
    if in_parts:  # the states of each group may differ
        names = [
            element_states(optimizer_class, group, defaults, group["params"][0].device)
            for group in groups
            if group["params"]
        ]
        stand_ins = [{**group, "params": []} for group in stand_ins]
    tried = optimizer_class(stand_ins, **defaults)
    filled = [
        {**options, "params": group["params"]}
        for options, group in zip(tried.param_groups, groups, strict=True)
    ]
    states = frozenset().union(*names) if in_parts else frozenset()
    return Agreed(filled, dict(tried.defaults), states)


def _without_elements(parameter: Tensor) -> Tensor:
    """Return a parameter of as many dimensions, which takes no memory."""
    nothing = parameter.detach().new_empty([0] * parameter.dim())
    return nn.Parameter(nothing, parameter.requires_grad)


def _form_of(groups: list[dict[str, Any]]) -> Form:
    """Return what must be the same on all ranks: parameters and their options."""
    form: Form = {}
    for g, options in enumerate(groups):
        form[f"group {g}"] = repr(options_of(options))
    for parameter, name in names_of(groups).items():
        dtype = str(parameter.dtype).removeprefix("torch.")
        form[name] = (
            f"{dtype} {[*parameter.shape]} on {parameter.device.type}, "
            f"requires_grad={parameter.requires_grad}"
        )
    return form


def names_of(groups: Iterable[dict[str, Any]]) -> dict[Tensor, str]:
    """Return a name for each parameter: its own if the optimizer was told, or a number.

    `Optimizer(model.named_parameters(), ...)` tells them; otherwise the names are "0",
    "1", ..., the numbers of the parameters in `state_dict`.
    """
    names: dict[Tensor, str] = {}
    taken = set()
    for group in groups:
        told = group.get("param_names") or [""] * len(group["params"])
        for parameter, name in zip(group["params"], told, strict=True):
            if not name or name in taken:
                name = f"{name}{len(names)}"
            taken.add(names.setdefault(parameter, name))
    return names


def _problem_with(groups: list[dict[str, Any]]) -> str | None:
    """Return why these parameters cannot be stepped by several ranks, or None."""
    names = names_of(groups)
    if not any(p.requires_grad and p.numel() for p in names):
        return "no parameter requires a gradient: there is nothing to do"
    end, before = 0, ""
    for parameter, name in sorted(names.items(), key=lambda item: item[0].data_ptr()):
        if parameter.is_meta:
            return f"parameter {name} is on the meta device: it has no numbers"
        if parameter.layout is not torch.strided:
            return f"parameter {name} is {parameter.layout}; only dense ones can be cut"
        if parameter.numel() and parameter.data_ptr() < end:
            return (
                f"parameters {before} and {name} are two, but share memory; tie them "
                "by using one parameter twice"
            )
        if parameter.numel():
            end, before = parameter.data_ptr() + parameter.nbytes, name
    return None
