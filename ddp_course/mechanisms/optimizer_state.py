"""The state of an optimizer whose parameters are divided, as one process has it.

Chapters 07 and 08.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.assembly import assemble, way_of
from ddp_course.mechanisms.placements import Flat, Shard, Step

Group = dist.ProcessGroup
Names = list[list[str]]  # what an optimizer steps in each of its groups, in order


def full_optimizer_state(
    optimizer: Optimizer,
    names: Names,
    groups: Sequence[Group],
    everywhere: bool = False,
) -> dict[str, Any]:
    """Return the state that `optimizer` would have in one process, on the CPU.

    All ranks along the groups call it. The first one along all groups gets the state,
    the others an empty dict, unless `everywhere`. Raises ReplicaError, on every rank,
    for states of other shapes.

    Args:
        optimizer: steps parameters that were placed along the groups, or pieces.
        names: of the parameters that it would step in one process, group by group.
        groups: along which the parameters were divided.
        everywhere: whether all ranks want the state.
    """
    agreed(lambda: _check_parts(optimizer), *groups)
    own = {way_of(p).name: (way_of(p), state) for p, state in optimizer.state.items()}
    order = [name for those in names for name in those]
    whole = assemble(own, groups, order, everywhere)
    if not everywhere and any(dist.get_rank(group) for group in groups):
        return {}
    numbers = {name: number for number, name in enumerate(order)}
    told = []
    for group, those in zip(optimizer.param_groups, names, strict=True):
        told.append({**options_of(group), "params": [numbers[n] for n in those]})
        if "param_names" in group:
            told[-1]["param_names"] = those
    states = {numbers[name]: state for name, state in whole.items() if state}
    return {"state": dict(sorted(states.items())), "param_groups": told}


def load_full_optimizer_state(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    names: Names,
    shapes: Mapping[str, torch.Size],
    groups: Sequence[Group],
) -> None:
    """Let `optimizer` go on from the state of one process: each rank its own part.

    Called by all ranks, with the whole of it. `names` are those that it would have in
    one process, and `shapes` theirs. Raises ReplicaError, on every rank, if it does not
    fit.
    """
    agreed(lambda: check_state(state_dict, names, shapes), *groups)
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    known = dict(zip((n for those in names for n in those), keys, strict=True))
    own = {**optimizer.state_dict(), "state": {}}
    groups_of_both = own["param_groups"], state_dict["param_groups"]
    for group, saved in zip(*groups_of_both, strict=True):
        group.update(options_of(saved))
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    for number, parameter in enumerate(stepped):
        way = way_of(parameter)
        state = state_dict["state"].get(known[way.name], {})
        if state:
            steps = [step for step in way.steps if step.group in groups]
            own["state"][number] = {k: _part(k, v, steps) for k, v in state.items()}
    optimizer.load_state_dict(own)


def names_along(
    optimizer: Optimizer, order: Iterable[str], groups: Sequence[Group]
) -> Names:
    """Return what the plain optimizer would have in each group, in the given order.

    Called by all ranks. Raises ReplicaError, on every rank, for other tensors.
    """
    stepped = [group["params"] for group in optimizer.param_groups]
    own = agreed(lambda: _names_of(stepped), *groups)
    for group in groups:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, own, group)
        counts = [len(part) for part in parts]
        agreed(lambda counts=counts: _check_counts(counts), *groups)
        own = [set().union(*those) for those in zip(*parts, strict=True)]
    order = list(order)
    return [[name for name in order if name in names] for names in own]


def _names_of(stepped: list[list[Tensor]]) -> list[set[str]]:
    try:
        return [{way_of(p).name for p in params} for params in stepped]
    except ValueError as error:
        raise ValueError(f"the optimizer steps what it should not: {error}") from None


def _check_counts(counts: list[int]) -> None:
    if len(set(counts)) > 1:
        raise ValueError(f"the ranks' optimizers have {counts} parameter groups")


def _check_parts(optimizer: Optimizer) -> None:
    """Raise ValueError for a state that is no part of a whole one, as of Adafactor."""
    for p, state in optimizer.state.items():
        cut = any(isinstance(s.placement, (Shard, Flat)) for s in way_of(p).steps)
        for key, value in state.items():
            if cut and _has_dims(value) and value.shape != p.shape:
                raise ValueError(
                    f"the state {key} of {way_of(p).name} has the shape "
                    f"{[*value.shape]}; only states of the parameter's own shape, "
                    f"{[*p.shape]}, can be put together"
                )


def check_state(
    state_dict: Any, names: list[list[str]], shapes: Mapping[str, torch.Size]
) -> None:
    """Raise ValueError for a state that is none of an optimizer of these parameters."""
    try:
        lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        states = {key: dict(state) for key, state in state_dict["state"].items()}
    except Exception as error:
        text = f"this is no state_dict of an optimizer: {error!r}"
        raise ValueError(text) from None
    if lengths != (own := [len(those) for those in names]):
        raise ValueError(
            f"the state_dict has groups of {lengths} parameters; this optimizer has "
            f"groups of {own}"
        )
    known = dict(zip(keys, (n for those in names for n in those), strict=True))
    for key, state in states.items():
        if key not in known:
            raise ValueError(
                f"the state_dict has a state of {key}, but no parameter {key}"
            )
        for name, value in state.items():
            shape = shapes[known[key]]
            if _has_dims(value) and value.shape != shape:
                raise ValueError(
                    f"the state {name} of {known[key]} has the shape "
                    f"{[*value.shape]}; it must be {[*shape]}"
                )


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _part(key: str, value: Any, steps: Sequence[Step]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if steps and key != "step" and value.shape == steps[0].shape:
        for step in steps:
            value = step.part(value)
    return value.clone()


def _has_dims(value: Any) -> bool:
    """Tell whether a state has a number for each element, as "step" has not."""
    return isinstance(value, Tensor) and value.dim() > 0
