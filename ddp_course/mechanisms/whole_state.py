"""The full state of a divided model, in the form that one process would have.

    full_state_dict             load_full_state_dict
    full_optimizer_state_dict   load_full_optimizer_state_dict

The states have the names, shapes and numbers of the plain model, so that a run can go
on in one process, with another strategy, or on another number of ranks. `assembly` puts
the parts together. Loading is easier: all ranks have the whole state, and each keeps
its own part. All ranks along `model.groups` call these functions together. They are no
methods, so that a divided module can be read without them. PyTorch, too, has functions
for DTensors (`get_model_state_dict` in torch.distributed.checkpoint.state_dict).
Chapter 08.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.assembly import (
    Group,
    Names,
    assemble,
    full_optimizer_state,
    load_full_optimizer_state,
    way_of,
)
from ddp_course.mechanisms.divided import DividedModule
from ddp_course.mechanisms.placements import Placed


def full_state_dict(model: DividedModule) -> dict[str, Tensor]:
    """Return the `state_dict` of the plain module, on the CPU."""
    own = {way_of(p).name: (way_of(p), {"": p}) for p in model.parameters()}
    own |= {k: (Placed(k, b.shape), {"": b}) for k, b in buffers_of(model).items()}
    whole = assemble(own, model.groups, model.plain.shapes, everywhere=True)
    return {key: whole[name or key][""] for key, name in model.plain.keys.items()}


@torch.no_grad()
def load_full_state_dict(
    model: DividedModule, state_dict: Mapping[str, Tensor]
) -> None:
    """Load a plain module's `state_dict`; each rank copies its own part.

    Raises ReplicaError, on every rank, if names or shapes do not fit.
    """
    agreed(lambda: model.plain.check(state_dict), *model.groups)
    keys = {name: key for key, name in model.plain.keys.items() if name}
    for parameter in model.parameters():
        way = way_of(parameter)
        parameter.copy_(way.part(state_dict[keys[way.name]]))
    for key, buffer in buffers_of(model).items():
        buffer.copy_(state_dict[key])


def full_optimizer_state_dict(
    model: DividedModule, optimizer: Optimizer
) -> dict[str, Any]:
    """Return, on all ranks, the state that `optimizer` would have in one process."""
    names = names_along(optimizer, model.plain.shapes, model.groups)
    return full_optimizer_state(optimizer, names, model.groups, everywhere=True)


def load_full_optimizer_state_dict(
    model: DividedModule, optimizer: Optimizer, state_dict: Mapping[str, Any]
) -> None:
    """Load the state that one process would have; each rank keeps its own part."""
    shapes, groups = model.plain.shapes, model.groups
    names = names_along(optimizer, shapes, groups)
    load_full_optimizer_state(optimizer, state_dict, names, shapes, groups)


def names_along(
    optimizer: Optimizer, order: Iterable[str], groups: Sequence[Group]
) -> Names:
    """Return the names that the plain optimizer would have in each group, in `order`.

    All ranks call it. Raises ReplicaError, on every rank, if the optimizer steps
    tensors that are no part of the model.
    """
    stepped = [group["params"] for group in optimizer.param_groups]
    own = agreed(lambda: _names_of(stepped), *groups)
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, own, group)
        counts = [len(part) for part in parts]
        agreed(lambda counts=counts: _check_counts(counts), *groups)
        own = [set().union(*same) for same in zip(*parts, strict=True)]
    order = list(order)
    return [[name for name in order if name in names] for names in own]


def _names_of(stepped: list[list[Tensor]]) -> list[set[str]]:
    try:
        return [{way_of(p).name for p in params} for params in stepped]
    except ValueError as error:
        raise ValueError(f"the optimizer steps a foreign tensor: {error}") from None


def _check_counts(counts: list[int]) -> None:
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks' optimizers have {counts} parameter groups")


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return this rank's buffers that belong to the plain model's state, by key."""
    inner = getattr(module, "module", module)
    while hasattr(inner, "module"):
        inner = inner.module
    found = dict(inner.named_buffers(remove_duplicate=False))
    keys = [key for key, name in module.plain.keys.items() if name is None]
    return {key: found[key] for key in keys if key in found}
