"""A part of a sharded optimizer's construction: its arguments, checked and compared.

Parameters that differ between the ranks would be added to each other, or hang. So the
arguments of all ranks are compared first, and whatever is wrong on one rank, every rank
raises the same `ReplicaError`; nothing has been sent by then. Chapter 07.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import agreed, kind_of, stepped_in_backward
from ddp_course.mechanisms.buckets import bucket_plan
from ddp_course.mechanisms.elementwise import check_elementwise
from ddp_course.zero.options import copy_options
from ddp_course.zero.shards import names_of

Groups = list[dict[str, Any]]  # parameter groups, as PyTorch keeps them


def agreed_groups(
    params: Iterable[Any],
    optimizer_class: Callable[..., Optimizer],
    defaults: dict[str, Any],
    process_group: dist.ProcessGroup | None,
    bucket_cap_mb: float,
    **options: Any,
) -> Groups:
    """Return parameter groups with all options filled in, the same on all ranks.

    A collective call, which sends no tensor. The arguments are those of
    `ZeroRedundancyOptimizer`; `options` are more that must be the same on all ranks.
    Raises ReplicaError, with the same text on every rank. Chapter 07.
    """

    def checked() -> Groups:
        bucket_plan((), bucket_cap_mb)  # raises if the cap is wrong
        groups = Optimizer(params, {}).param_groups  # and if the parameters are
        check_parameters(groups)
        for group in groups:
            if group["params"]:
                device = group["params"][0].device
                given: Groups = [{}]
                copy_options([group], given)
                check_elementwise(optimizer_class, given[0], defaults, device)
        return filled_in(groups, optimizer_class, defaults)

    options = {"bucket_cap_mb": bucket_cap_mb, **options}
    form = {f"argument {name}": repr(value) for name, value in options.items()}
    groups = agreed(checked, process_group, **form)
    return agreed(lambda: groups, process_group, **form_of_groups(groups))


def filled_in(
    groups: Groups, optimizer_class: Callable[..., Optimizer], defaults: dict[str, Any]
) -> Groups:
    """Let an optimizer without parameters fill in the options of every group."""
    stand_ins: Groups = [{"params": []} for _ in groups]
    copy_options(groups, stand_ins)
    tried = optimizer_class(stand_ins, **defaults)
    copy_options(tried.param_groups, groups)
    return groups


def form_of_groups(groups: Groups) -> dict[str, str]:
    """Return what must be the same on all ranks: parameters and their options."""
    form = {}
    for number, group in enumerate(groups):
        options: Groups = [{}]
        copy_options([group], options)
        form[f"group {number}"] = repr(options[0])
    for parameter, name in names_of(groups).items():
        trained = f"requires_grad={parameter.requires_grad}"
        form[name] = f"{kind_of(parameter)} on {parameter.device.type}, {trained}"
    return form


def check_parameters(groups: Groups) -> None:
    """Raise ValueError if these parameters cannot be laid in rows and cut."""
    names = names_of(groups)
    if not any(p.requires_grad and p.numel() for p in names):
        raise ValueError("no parameter requires a gradient: there is nothing to do")
    end, before = 0, ""
    for parameter, name in sorted(names.items(), key=lambda item: item[0].data_ptr()):
        if parameter.is_meta:
            raise ValueError(
                f"parameter {name} is on the meta device: it has no numbers"
            )
        if problem := stepped_in_backward(f"parameter {name}", parameter):
            raise ValueError(problem)
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"parameter {name} is {parameter.layout}; only dense ones can be cut"
            )
        if parameter.numel() and parameter.data_ptr() < end:
            raise ValueError(
                f"parameters {before} and {name} are two, but share memory; tie them "
                "by using one parameter twice"
            )
        if parameter.numel():
            end, before = parameter.data_ptr() + parameter.nbytes, name
