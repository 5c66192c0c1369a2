"""Assemble divided tensors: add up the numbers that each rank owns.

Every number of a divided tensor has one owner (`placements`). So each rank writes the
numbers that it owns into zeros of the whole tensor's shape, and the sum over the ranks
is the whole tensor:

    rank 0   [1.5, 2.5,   0,   0]
    rank 1   [  0,   0, 3.5, 4.5]
    sum      [1.5, 2.5, 3.5, 4.5]

Bytes are added, as integers, so no bit changes, not even those of -0.0 and nan. Small
tensors are summed together, because every message takes time, and large ones one by
one, so that memory holds the parts, the result and one more large tensor. A sharded
checkpoint does the same with files in place of the sum (`zero.sharded_checkpoint`).

The state of a divided optimizer is assembled in the same way. To load it, all ranks
pass the whole state, and each keeps its own part. Chapters 07 and 08.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.placements import (
    Flat,
    Placed,
    Shard,
    Step,
    dense_stride,
    device_of,
    in_memory_order,
    placed,
)

Group = dist.ProcessGroup
Names = list[list[str]]  # the parameters' names in each group of an optimizer, in order
State = dict[str, Any]  # a parameter's state: name -> value
TOGETHER = 2**20  # bytes of small tensors that are summed together, at most
Item = tuple[Placed, State]  # how a parameter was cut, and its state, cut likewise


def way_of(tensor: Tensor) -> Placed:
    """Return how a tensor was placed. Raises ValueError if it was not placed."""
    if (way := placed(tensor)) is None:
        raise ValueError(
            f"a tensor of shape {[*tensor.shape]} is no part of this model; use the "
            "model's parameters()"
        )
    return way


@dataclass(frozen=True)
class Form:
    """The form of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def form_of(value: Any, steps: Sequence[Step]) -> Form | None:
    """Return the form of the undivided `value`; None if it was not cut.

    A state without dimensions (the count "step") or of another shape is not cut.
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    if not steps:
        return Form(value.dtype, tuple(value.shape), dense_stride(value))
    if tuple(value.shape) != steps[-1].part_shape:
        return None
    return Form(value.dtype, steps[0].shape, steps[0].stride)


def assemble(
    own: Mapping[str, Item],
    groups: Sequence[Group],
    order: Iterable[str],
    everywhere: bool = False,
) -> dict[str, State]:
    """Return the whole states of all names in `order`, on the CPU.

    All ranks along the groups call it together. The first rank along all groups gets
    the result, the others an empty dict; with `everywhere` all ranks get it.

    Args:
        own: this rank's parts, by name.
        groups: the groups along which the tensors were divided.
        order: all possible names, the same on all ranks.
        everywhere: whether all ranks get the result.
    """
    steps = {
        name: [step for step in way.steps if step.group in groups]
        for name, (way, _) in own.items()
    }
    known = _known(own, steps, groups)
    where = device_of(groups[0]) if groups else "cpu"
    whole: dict[str, State] = {}
    waiting: list[tuple[Tensor, State, str]] = []  # a summand; the sum is state[key]
    for name in order:
        if name not in known:
            continue
        holder, entries = known[name]
        owned = name in own and _owns(steps[name], groups, holder)
        state = whole[name] = dict(entries)
        for key, entry in entries.items():
            if isinstance(entry, Form):
                part = own[name][1].get(key) if owned else None
                zeros = torch.empty_strided(
                    entry.shape, entry.stride, dtype=entry.dtype, device=where
                ).zero_()
                if part is not None:
                    part = part.detach()
                    for step in reversed(steps[name]):
                        part = step.zero_pad(part)
                    zeros.copy_(part)
                if zeros.nbytes + sum(z.nbytes for z, _, _ in waiting) > TOGETHER:
                    _sum(waiting, groups, everywhere)
                waiting.append((zeros, state, key))
    _sum(waiting, groups, everywhere)
    first = all(dist.get_rank(group) == 0 for group in groups)
    return whole if everywhere or first else {}


def _known(
    own: Mapping[str, Item], steps: Mapping[str, list[Step]], groups: Sequence[Group]
) -> dict[str, tuple[int, State]]:
    """Return, for each name, the first rank that has it, and the entries of its state.

    An entry is a `Form` for a tensor that has to be summed, else the value itself.
    """
    known: dict[str, tuple[int, State]] = {}
    for name, (_, state) in own.items():
        entries = {key: form_of(v, steps[name]) or _copy(v) for key, v in state.items()}
        known[name] = dist.get_rank(), entries
    for group in groups:
        shown: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(shown, known, group)
        known = {}
        for name, (rank, entries) in (item for one in shown for item in one.items()):
            before, others = known.get(name, (rank, {}))
            both = {**entries, **others} if before <= rank else {**others, **entries}
            known[name] = min(before, rank), both
    return known


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _owns(steps: Sequence[Step], groups: Sequence[Group], holder: int) -> bool:
    """Return whether this rank has to write its part.

    Rank `holder` writes a tensor that was not placed, such as a buffer.
    """
    if not steps:
        return dist.get_rank() == holder
    noted = {step.group for step in steps}
    others = (group for group in groups if group not in noted)
    return all(s.owns for s in steps) and all(dist.get_rank(g) == 0 for g in others)


def _sum(waiting: list[tuple], groups: Sequence[Group], everywhere: bool) -> None:
    """Add up all ranks' tensors; store each sum, or None on a rank that gets none."""
    flats = [in_memory_order(z, z.stride()).view(torch.uint8) for z, _, _ in waiting]
    data = flats[0] if len(flats) == 1 else torch.cat([torch.empty(0).byte(), *flats])
    wanted = True
    for group in reversed(groups) if data.numel() else ():
        if everywhere:
            dist.all_reduce(data, group=group)
        elif wanted:
            dist.reduce(data, dist.get_global_rank(group, 0), group=group)
            wanted = dist.get_rank(group) == 0
    parts = data.split([*map(len, flats)])
    for (zeros, state, key), flat, part in zip(waiting, flats, parts, strict=True):
        flat.copy_(part)
        state[key] = zeros.cpu() if wanted else None
    waiting.clear()


# ---- the state of an optimizer ------------------------------------------------------


def full_optimizer_state(
    optimizer: Optimizer,
    names: Names,
    groups: Sequence[Group],
    everywhere: bool = False,
) -> dict[str, Any]:
    """Return the state that `optimizer` would have in one process, on the CPU.

    All ranks along the groups call it. The rank that is first in every group gets the
    state, the others an empty dict, unless `everywhere`. Raises ReplicaError, on every
    rank, for states with other shapes than their parameters.

    Args:
        optimizer: steps parameters placed along the groups, or pieces of such ones.
        names: for each of its groups, the parameters that it would step in one process.
        groups: the process groups along which the parameters were divided.
        everywhere: whether all ranks get the state.
    """
    agreed(lambda: _check_parts(optimizer), *groups)
    own = {way_of(p).name: (way_of(p), state) for p, state in optimizer.state.items()}
    order = [name for members in names for name in members]
    whole = assemble(own, groups, order, everywhere)
    if not everywhere and any(dist.get_rank(group) for group in groups):
        return {}
    numbers = {name: number for number, name in enumerate(order)}
    param_groups = []
    for group, members in zip(optimizer.param_groups, names, strict=True):
        its_numbers = [numbers[name] for name in members]
        param_groups.append({**options_of(group), "params": its_numbers})
        if "param_names" in group:
            param_groups[-1]["param_names"] = members
    states = {numbers[name]: state for name, state in whole.items() if state}
    return {"state": dict(sorted(states.items())), "param_groups": param_groups}


def load_full_optimizer_state(
    optimizer: Optimizer,
    state_dict: Mapping[str, Any],
    names: Names,
    shapes: Mapping[str, torch.Size],
    groups: Sequence[Group],
) -> None:
    """Load the state that one process would have; each rank keeps its own part.

    All ranks call it, with the whole state. `names` and `shapes` are those of the
    parameters in one process. Raises ReplicaError, on every rank, if the state does not
    fit.
    """
    agreed(lambda: check_state(state_dict, names, shapes), *groups)
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    known = dict(zip((n for members in names for n in members), keys, strict=True))
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


def _check_parts(optimizer: Optimizer) -> None:
    """Raise ValueError for states not shaped like their parameters (Adafactor)."""
    for p, state in optimizer.state.items():
        cut = any(isinstance(s.placement, (Shard, Flat)) for s in way_of(p).steps)
        for key, value in state.items():
            if cut and _has_dims(value) and value.shape != p.shape:
                raise ValueError(
                    f"the state {key} of {way_of(p).name} has the shape "
                    f"{[*value.shape]}; only states of the parameter's own shape, "
                    f"{[*p.shape]}, can be assembled"
                )


def check_state(
    state_dict: Any, names: list[list[str]], shapes: Mapping[str, torch.Size]
) -> None:
    """Raise ValueError if no optimizer of these parameters has such a state."""
    try:
        lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        states = {key: dict(state) for key, state in state_dict["state"].items()}
    except Exception as error:
        text = f"this is no state_dict of an optimizer: {error!r}"
        raise ValueError(text) from None
    if lengths != (own := [len(members) for members in names]):
        raise ValueError(
            f"the state_dict has groups of {lengths} parameters; this optimizer has "
            f"groups of {own}"
        )
    known = dict(zip(keys, (n for members in names for n in members), strict=True))
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
    """Return whether a state is a tensor with dimensions; "step" is a scalar."""
    return isinstance(value, Tensor) and value.dim() > 0
