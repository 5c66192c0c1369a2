"""The state of a pipeline in the form of one process, and back.

Every rank has the whole tensors of its own layers, under the names that they have in
the plain model; so the whole state is what all have together. An optimizer knows
parameters by number, in the plain model's order; here each has only some of them.
Tensors travel rank by rank, in messages of about 25 MiB. Chapter 10.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_course.mechanisms.agreement import broadcast_all, check_same
from ddp_course.mechanisms.whole import unlike

if TYPE_CHECKING:
    from ddp_course.pipeline.staged_module import StagedModule

State = dict[str, Any]


def _of_all(pipeline: StagedModule, own: State) -> Iterator[State]:
    """Yield what each rank has, one after the other; called by all."""
    comm = pipeline.comm
    for index, src in enumerate(comm.ranks):
        mine = index == comm.rank
        form = [tree_map_only(Tensor, lambda t: t.to("meta"), own) if mine else None]
        dist.broadcast_object_list(form, src, comm.group)
        theirs = own
        if not mine:
            theirs = tree_map_only(
                Tensor, lambda t: torch.empty_like(t, device=pipeline.device), form[0]
            )
        on_device = tree_map_only(Tensor, lambda t: t.to(pipeline.device), theirs)
        tensors = [t for t in tree_leaves(on_device) if isinstance(t, Tensor)]
        broadcast_all(tensors, src, comm.group)
        yield on_device


def _on_cpu(state: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), state)


# ---- the module ----------------------------------------------------------------------


def gathered(pipeline: StagedModule, rank0_only: bool) -> dict[str, Tensor]:
    """Return the state of the plain module; see StagedModule.full_state_dict."""
    wanted, whole = not rank0_only or pipeline.comm.rank == 0, {}
    for part in _of_all(pipeline, dict(pipeline.module.state_dict())):
        whole |= _on_cpu(part) if wanted else {}
    return {key: whole[key] for key in pipeline.shapes} if wanted else {}


def load(pipeline: StagedModule, state_dict: Mapping[str, Tensor]) -> None:
    """Keep the own part of a state; see StagedModule.load_full_state_dict."""
    problem = unlike(state_dict, pipeline.shapes)
    check_same({}, problem, pipeline.group)
    own = pipeline.module.state_dict()
    pipeline.module.load_state_dict({key: state_dict[key] for key in own})


# ---- the optimizer -------------------------------------------------------------------


def gathered_optimizer(
    pipeline: StagedModule, optimizer: torch.optim.Optimizer, rank0_only: bool
) -> State:
    """Return the state of the plain optimizer; see full_optimizer_state_dict."""
    wanted, states = not rank0_only or pipeline.comm.rank == 0, {}
    by_group = _names(pipeline, optimizer)
    numbers = {n: k for k, n in enumerate(n for names in by_group for n in names)}
    own = {_name(pipeline, p): state for p, state in optimizer.state.items()}
    for part in _of_all(pipeline, own):
        states |= _on_cpu(part) if wanted else {}
    if not wanted:
        return {}
    groups = []
    for group, names in zip(optimizer.param_groups, by_group, strict=True):
        groups.append({**group, "params": [numbers[name] for name in names]})
        if "param_names" in group:
            groups[-1]["param_names"] = names
    by_number = {numbers[name]: state for name, state in states.items()}
    return {"state": dict(sorted(by_number.items())), "param_groups": groups}


def load_optimizer(
    pipeline: StagedModule, optimizer: torch.optim.Optimizer, state: Mapping
) -> None:
    """Keep the own part of a state; see load_full_optimizer_state_dict."""
    by_group, states, problem = _names(pipeline, optimizer), {}, None
    try:
        states = _by_name(pipeline, state, by_group)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"this is no state of the plain optimizer: {error}"
    check_same({}, problem, pipeline.group)
    mine: State = {"state": {}, "param_groups": []}
    number = 0
    saved = state["param_groups"]
    for group, told in zip(optimizer.param_groups, saved, strict=True):
        names = [_name(pipeline, p) for p in group["params"]]
        mine["param_groups"].append(
            {**told, "params": [*range(number, number + len(names))]}
        )
        if "param_names" in told:
            mine["param_groups"][-1]["param_names"] = names
        for name in names:
            if name in states:
                mine["state"][number] = states[name]
            number += 1
    optimizer.load_state_dict(mine)


def _name(pipeline: StagedModule, parameter: Tensor) -> str:
    """Return the name that a parameter of this rank has in the plain model."""
    for name, own in pipeline.parameters_by_name.items():
        if own is parameter:
            return name
    raise ValueError(
        f"the optimizer steps a tensor of shape {[*parameter.shape]} that is none of "
        "this module's; make it of its parameters()"
    )


def _names(pipeline: StagedModule, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return what the plain optimizer would have in each group, by name; collective.

    Raises ReplicaError, on every rank, if that cannot be.
    """
    own, problem = [], None
    try:
        for group in optimizer.param_groups:
            own.append(tuple(_name(pipeline, p) for p in group["params"]))
    except ValueError as error:
        problem = str(error)
    form = {"the number of parameter groups": str(len(optimizer.param_groups))}
    check_same(form, problem, pipeline.group)
    of_all = pipeline.comm.exchange(tuple(own))
    order = list(pipeline.plan.holders)
    return [
        sorted({name for names in parts for name in names}, key=order.index)
        for parts in zip(*of_all, strict=True)
    ]


def _by_name(
    pipeline: StagedModule, state: Mapping, by_group: list[list[str]]
) -> dict[str, State]:
    """Return the states of a plain optimizer by the names of their parameters."""
    sizes = [len(group["params"]) for group in state["param_groups"]]
    if sizes != [len(names) for names in by_group]:
        raise ValueError(
            f"its groups have {sizes} parameters; they must have "
            f"{[len(names) for names in by_group]}"
        )
    keys = [key for group in state["param_groups"] for key in group["params"]]
    names = [name for names in by_group for name in names]
    found = {}
    for name, key in zip(names, keys, strict=True):
        for value in state["state"].get(key, {}).values():
            shape = pipeline.shapes[name]
            if isinstance(value, Tensor) and value.dim() and value.shape != shape:
                raise ValueError(
                    f"{name} has {list(value.shape)} in it; it must be {list(shape)}"
                )
        if key in state["state"]:
            found[name] = state["state"][key]
    return found
