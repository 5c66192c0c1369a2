"""The whole state of a sharded model, in the form of one process, and back.

One process has a tensor for each parameter, by its name, and an optimizer state for
each, by its number. Here every rank has a part of long flat tensors. Whole tensors are
made flat by flat, so never more than one is there beside the shards and the result.
Chapter 08.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_course.mechanisms.replicas import check_same
from ddp_course.mechanisms.whole import unlike
from ddp_course.zero.gather import Messages, part_of
from ddp_course.zero.states import in_memory_order, problem_with

if TYPE_CHECKING:
    from ddp_course.zero.live import LiveFlat
    from ddp_course.zero.sharded_module import ShardedModule

State = dict[str, Any]  # of one parameter: name -> value


def places(module: nn.Module) -> dict[str, str | None]:
    """Return the names in `state_dict`, each with its parameter's; None: a buffer.

    They differ for tied parameters, which have several names there.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    return {key: names.get(v) for key, v in module.state_dict(keep_vars=True).items()}


def buffers(sharded: ShardedModule) -> dict[str, Tensor]:
    """Return the buffers that belong to the module's state, by name."""
    found = dict(sharded.module.named_buffers(remove_duplicate=False))
    return {key: found[key] for key, name in sharded._places.items() if name is None}


# ---- the module ----------------------------------------------------------------------


def gathered(sharded: ShardedModule, rank0_only: bool) -> dict[str, Tensor]:
    """Return the state of the plain module; see ShardedModule.full_state_dict."""
    wanted = not rank0_only or sharded.comm.rank == 0
    whole: dict[str, Tensor] = {}
    for flat in sharded.flats.values():
        for name, view in _whole(sharded, flat, flat.shard.detach()):
            if wanted:
                whole[name] = view.to("cpu", copy=True)
    if not wanted:
        return {}
    kept = {k: b.to("cpu", copy=True) for k, b in buffers(sharded).items()}
    return {
        key: kept[key] if name is None else whole[name]
        for key, name in sharded._places.items()
    }


@torch.no_grad()
def load(sharded: ShardedModule, state_dict: Mapping[str, Tensor]) -> None:
    """Keep the own part of a state; see ShardedModule.load_full_state_dict."""
    kept, parameters = buffers(sharded), _parameters(sharded)
    shapes = {
        key: (kept[key] if name is None else parameters[name]).shape
        for key, name in sharded._places.items()
    }
    check_same({}, unlike(state_dict, shapes), sharded.process_group)
    for flat in sharded.flats.values():
        _keep_own(sharded, flat, state_dict, flat.shard.detach())
    for key, buffer in kept.items():
        buffer.copy_(state_dict[key])


# ---- the optimizer -------------------------------------------------------------------


def gathered_optimizer(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer, rank0_only: bool
) -> dict[str, Any]:
    """Return the state of the plain optimizer; see full_optimizer_state_dict."""
    wanted = not rank0_only or sharded.comm.rank == 0
    by_group = _names(sharded, optimizer)
    numbers = {n: k for k, n in enumerate(n for names in by_group for n in names)}
    states: dict[int, State] = {k: {} for k in numbers.values()}
    for flat in stepped(sharded, optimizer):
        for key, value in optimizer.state.get(flat.shard, {}).items():
            parts = ((name, value) for name in flat.names)  # such as "step"
            if isinstance(value, Tensor) and value.shape == flat.shard.shape:
                parts = _whole(sharded, flat, value)
            for name, part in parts:
                if wanted and isinstance(part, Tensor):
                    part = part.to("cpu", copy=True)
                states[numbers[name]][key] = part
    if not wanted:
        return {}
    groups = []
    for group, names in zip(optimizer.param_groups, by_group, strict=True):
        groups.append({**_options(group), "params": [numbers[name] for name in names]})
        if "param_names" in group:
            groups[-1]["param_names"] = names
    states = {number: state for number, state in states.items() if state}
    return {"state": states, "param_groups": groups}


def load_optimizer(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Keep the own part of a state; see load_full_optimizer_state_dict."""
    parameters, by_group, problem = _parameters(sharded), [], None
    try:
        by_group = _names(sharded, optimizer)
    except ValueError as error:
        problem = str(error)
    ordered = [name for names in by_group for name in names]
    problem = problem or problem_with(
        state,
        [parameters[name] for name in ordered],
        [len(names) for names in by_group],
        _with_elements(state),
    )
    check_same({}, problem, sharded.process_group)
    keys = [key for group in state["param_groups"] for key in group["params"]]
    states = {
        name: state["state"].get(key, {})
        for name, key in zip(ordered, keys, strict=True)
    }
    own: dict[str, Any] = optimizer.state_dict()
    for group, told in zip(own["param_groups"], state["param_groups"], strict=True):
        group.update(_options(told))
    kept = [_own_state(sharded, f, states) for f in stepped(sharded, optimizer)]
    own["state"] = {number: state for number, state in enumerate(kept) if state}
    optimizer.load_state_dict(own)


def _own_state(
    sharded: ShardedModule, flat: LiveFlat, states: Mapping[str, State]
) -> State:
    """Return the state of a shard, made of those of the parameters in its flat."""
    own: State = {}
    shapes = {n: p.shape for n, p in zip(flat.names, flat.parameters, strict=True)}
    for key in dict.fromkeys(key for name in flat.names for key in states[name]):
        values = {n: states[n][key] for n in flat.names if key in states[n]}
        first = next(iter(values.values()))
        # A parameter may be a scalar, as "step" is, which is the same for all elements.
        if key != "step" and all(
            isinstance(value, Tensor) and value.shape == shapes[name]
            for name, value in values.items()
        ):
            own[key] = torch.zeros_like(flat.shard, dtype=first.dtype).detach()
            _keep_own(sharded, flat, values, own[key])
        else:
            own[key] = first.clone() if isinstance(first, Tensor) else first
    return own


def _with_elements(state: Any) -> frozenset[str]:
    """Return the names of the states that have a number for each element."""
    states = state.get("state") if isinstance(state, Mapping) else None
    told = list(states.values()) if isinstance(states, Mapping) else []
    return frozenset(
        key
        for each in told
        if isinstance(each, Mapping)
        for key, value in each.items()
        if isinstance(value, Tensor) and value.dim()
    )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


# ---- shards, and the parameters in them ----------------------------------------------


def _parameters(sharded: ShardedModule) -> dict[str, Tensor]:
    """Return the module's own parameters by name, in order, with or without numbers."""
    found = {
        name: parameter
        for flat in sharded.flats.values()
        for name, parameter in zip(flat.names, flat.parameters, strict=True)
    }
    return {name: found[name] for name in sharded._names}


def _flat_of(sharded: ShardedModule, shard: Tensor) -> LiveFlat:
    for flat in sharded.flats.values():
        if flat.shard is shard:
            return flat
    raise ValueError(
        f"the optimizer steps a tensor of shape {[*shard.shape]} that is no shard of "
        "this module; make it of its parameters()"
    )


def stepped(sharded: ShardedModule, optimizer: torch.optim.Optimizer) -> list[LiveFlat]:
    """Return the flats that the optimizer steps, in its order."""
    return [
        _flat_of(sharded, shard)
        for group in optimizer.param_groups
        for shard in group["params"]
    ]


def _names(sharded: ShardedModule, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return for each of its groups the plain parameters' names, in the plain order."""
    rank = {name: k for k, name in enumerate(sharded._names)}
    return [
        sorted(
            (n for shard in group["params"] for n in _flat_of(sharded, shard).names),
            key=rank.__getitem__,
        )
        for group in optimizer.param_groups
    ]


def _whole(
    sharded: ShardedModule, flat: LiveFlat, part: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Gather a tensor that lies in shards as the parameters do; yield it by name."""
    where = {"dtype": part.dtype, "device": flat.whole.device}
    whole = torch.empty(flat.plan.sharded.numel, **where)
    own = part_of(whole, sharded.comm.rank, sharded.comm.size)
    Messages(sharded.process_group).gather(whole, own, part.detach())
    yield from zip(flat.names, flat.views(whole), strict=True)


def _keep_own(
    sharded: ShardedModule, flat: LiveFlat, values: Mapping[str, Tensor], own: Tensor
) -> None:
    """Copy this rank's pieces of the parameters' `values` into `own`."""
    parameters = dict(zip(flat.names, flat.parameters, strict=True))
    for piece in flat.plan.pieces(sharded.comm.rank):
        if piece.parameter in values:
            value = in_memory_order(
                values[piece.parameter], parameters[piece.parameter]
            )
            place = own[piece.offset :][: piece.last - piece.first]
            place.copy_(value[piece.first : piece.last])
