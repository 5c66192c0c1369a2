"""Optimizer states: from the form of one process to what a rank owns, and back.

One process has for each parameter, by its number, a dict of states: of AdamW a step
counter and two tensors of the parameter's shape. A rank that owns the elements [3, 5)
of a parameter has the same dict with tensors of two elements. Pure. Chapter 07.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

State = Mapping[str, Any]  # of one parameter: name -> value
Parts = Mapping[int, tuple[int, int, State]]  # of one rank: number -> its part


@dataclass(eq=False)
class Owned:
    """What this rank owns of a parameter: its elements [first, last), as `tensor`.

    Elements are counted in the order of the parameter's memory.
    """

    parameter: Tensor
    first: int
    last: int
    tensor: nn.Parameter


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the elements of `tensor` as those of `like`, of the same shape, lie.

    One-dimensional, and a view if `tensor` lies that way already. `like` has no gaps.
    (The stride of a dimension of one element means nothing, and may differ.)
    """
    strides = zip(tensor.shape, tensor.stride(), like.stride(), strict=True)
    if any(length > 1 and own != other for length, own, other in strides):
        told = {"dtype": tensor.dtype, "device": tensor.device}
        copy = torch.empty_strided(like.shape, like.stride(), **told)
        tensor = copy.copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def part_of(state: State, owned: Owned, element_states: Set[str]) -> State:
    """Return the part of a parameter's state that belongs to what is owned of it.

    `element_states` are the names of the states with a number for each element; the
    others are the same for all parts.
    """
    part = {}
    for name, value in state.items():
        if name in element_states and isinstance(value, Tensor):
            whole = in_memory_order(value, owned.parameter)
            value = whole[owned.first : owned.last]
        part[name] = value.clone() if isinstance(value, Tensor) else value
    return part


def own_state_dict(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    owned: Mapping[Tensor, Owned],
    element_states: Set[str],
) -> dict[str, Any]:
    """Return the part of one process' state_dict that belongs to what is owned.

    It fits an optimizer of the same parameter groups with only what is owned in them.
    """
    states, own_groups = {}, []
    for group, saved in zip(groups, state_dict["param_groups"], strict=True):
        own_groups.append({**options_of(saved), "params": []})
        for parameter, key in zip(group["params"], saved["params"], strict=True):
            if parameter in owned:
                number = sum(len(own["params"]) for own in own_groups)
                own_groups[-1]["params"].append(number)
                if key in state_dict["state"]:
                    state = state_dict["state"][key]
                    states[number] = part_of(state, owned[parameter], element_states)
    return {"state": states, "param_groups": own_groups}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def on_cpu(state: State) -> dict[str, Any]:
    """Return a parameter's state with its tensors on the CPU, to be sent."""
    return {k: v.cpu() if isinstance(v, Tensor) else v for k, v in state.items()}


def joined(
    ranks: Sequence[Parts], parameters: Sequence[Tensor], element_states: Set[str]
) -> dict[int, dict[str, Any]]:
    """Return the states of one process from those of all ranks, on the CPU."""
    states: dict[int, dict[str, Any]] = {}
    for index, parameter in enumerate(parameters):
        parts = sorted(
            (parts[index] for parts in ranks if index in parts), key=lambda p: p[:2]
        )
        for first, last, state in parts:
            whole = states.setdefault(index, {})
            for name, value in state.items():
                if name not in element_states or not isinstance(value, Tensor):
                    whole[name] = value
                    continue
                if name not in whole:
                    told = {"dtype": value.dtype, "device": "cpu"}
                    whole[name] = torch.empty_like(parameter, **told)
                in_memory_order(whole[name], parameter)[first:last] = value
    return states


def problem_with(
    state_dict: Any,
    parameters: Sequence[Tensor],
    lengths: Sequence[int],
    element_states: Set[str],
) -> str | None:
    """Return why a state dict does not fit parameter groups of these lengths, or None.

    Raises nothing, whatever it is: the other ranks must hear of it.
    """
    try:
        groups = [list(group["params"]) for group in state_dict["param_groups"]]
        keys = [key for group in groups for key in group]
        by_key = dict(zip(keys, parameters, strict=False))
        states = state_dict["state"].items()
    except Exception as error:
        return f"this is no state_dict of an optimizer: {error!r}"
    if [len(group) for group in groups] != [*lengths]:
        return (
            f"the state_dict has groups of {[len(group) for group in groups]} "
            f"parameters; this optimizer has groups of {[*lengths]}"
        )
    for key, state in states:
        if key not in by_key:
            return f"the state_dict has a state of {key}, but no parameter {key}"
        for name in sorted(element_states & state.keys()):
            shape = getattr(state[name], "shape", None)
            if shape not in (None, by_key[key].shape):
                return (
                    f"the state {name} of parameter {key} has the shape {[*shape]}; "
                    f"it must be {[*by_key[key].shape]}"
                )
    return None
