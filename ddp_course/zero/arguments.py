"""Before anything is divided: do all ranks mean the same, and can it be done?

Parameters that differ between the ranks would be added to each other, or hang. So what
each rank was given is compared first, and whatever is wrong on one rank, every rank
raises the same `ReplicaError`; nothing has been sent by then. Chapter 07.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import Form, check_same
from ddp_course.mechanisms.buckets import bucket_plan
from ddp_course.mechanisms.elementwise import check_elementwise
from ddp_course.mechanisms.optimizer_state import options_of
from ddp_course.mechanisms.tensor_words import kind_of

Groups = list[dict[str, Any]]  # parameter groups, as PyTorch keeps them


def agreed_arguments(
    params: Iterable[Any],
    optimizer_class: Callable[..., Optimizer],
    defaults: dict[str, Any],
    group: dist.ProcessGroup | None,
    in_pieces: bool,
    problem: str | None = None,
    **options: Any,
) -> tuple[Groups, dict[str, Any]]:
    """Return parameter groups with all options filled in, and the optimizer's defaults.

    A collective call, which sends no tensor.

    Args:
        params, optimizer_class, defaults: as ZeroRedundancyOptimizer takes them.
        group: the ranks.
        in_pieces: the optimizer must be able to step pieces of tensors.
        problem: what this rank has found to be wrong already.
        options: more that must be the same on all ranks.

    Raises ReplicaError, with the same text on every rank. Chapter 07.
    """
    form: Form = {f"argument {name}": repr(value) for name, value in options.items()}
    groups: Groups = []
    try:
        if not problem:
            if "bucket_cap_mb" in options:
                bucket_plan((), options["bucket_cap_mb"])  # which checks it
            groups = Optimizer(params, {}).param_groups  # and PyTorch the parameters
            problem = _problem_with(groups)
        if not problem:
            groups, defaults = _filled_in(groups, optimizer_class, defaults, in_pieces)
            form |= _form_of(groups)
    except Exception as error:  # whatever it is, the other ranks must not wait
        problem = f"{error}" if isinstance(error, ValueError) else repr(error)
    check_same(form, problem, group)
    return groups, defaults


def _filled_in(
    groups: Groups,
    optimizer_class: Callable[..., Optimizer],
    defaults: dict[str, Any],
    in_pieces: bool,
) -> tuple[Groups, dict[str, Any]]:
    """Let the optimizer fill in the options of every group; stand-ins take no room."""
    stand_ins = []
    for group in groups:
        if in_pieces and group["params"]:
            device = group["params"][0].device
            check_elementwise(optimizer_class, options_of(group), defaults, device)
        empty = [nn.Parameter(p.new_empty([0] * p.dim())) for p in group["params"]]
        stand_ins.append({**group, "params": [] if in_pieces else empty})
    tried = optimizer_class(stand_ins, **defaults)
    filled = [
        {**options, "params": group["params"]}
        for options, group in zip(tried.param_groups, groups, strict=True)
    ]
    return filled, dict(tried.defaults)


def _form_of(groups: Groups) -> Form:
    """Return what must be the same on all ranks: parameters and their options."""
    form = {f"group {g}": repr(options_of(group)) for g, group in enumerate(groups)}
    for parameter, name in names_of(groups).items():
        trained = f"requires_grad={parameter.requires_grad}"
        form[name] = f"{kind_of(parameter)} on {parameter.device.type}, {trained}"
    return form


def names_of(groups: Groups) -> dict[Tensor, str]:
    """Return a name for each parameter: its own if the optimizer was told, or a number.

    `Optimizer(model.named_parameters(), ...)` tells them; otherwise the names are "0",
    "1", ..., the numbers of the parameters in `state_dict`.
    """
    names: dict[Tensor, str] = {}
    taken = set()
    for group in groups:
        given = group.get("param_names") or [""] * len(group["params"])
        for parameter, name in zip(group["params"], given, strict=True):
            if not name or name in taken:
                name = f"{name}{len(names)}"
            taken.add(names.setdefault(parameter, name))
    return names


def _problem_with(groups: Groups) -> str | None:
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
