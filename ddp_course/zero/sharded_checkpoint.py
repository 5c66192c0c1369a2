"""Sharded checkpoints: every rank writes its own part, and any number of ranks reads.

    save(folder, fsdp, optimizer)      on 4 ranks
    load(folder, fsdp, optimizer)      on 4, 3, 2 or 1

No rank ever has a whole model, so none could write it. The files are those of
torch.distributed.checkpoint: each rank's tensors, and beside them one file that says
which elements of which tensor are where. A rank that loads reads those that it now
owns, from whichever files they are in.

What is saved are the flats (`units`), without padding: of one that has n elements,
[r * c, (r + 1) * c) with c = ceil(n / N) belong to rank r. That is just how PyTorch
divides a DTensor with `Shard(0)`, so a flat is one. Where parameters begin in a flat
does not depend on N; but the units must be the same as when it was saved. Chapter 08.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ddp_course.mechanisms.replicas import check_same
from ddp_course.zero import full_state
from ddp_course.zero.live import LiveFlat
from ddp_course.zero.sharded_module import ShardedModule

OPTIONS = "optimizer/options"  # what is no tensor, as text


def save(
    folder: str | Path,
    sharded: ShardedModule,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write shards, buffers and the optimizer's states; called by all ranks.

    `folder` is one that all ranks see; it is made if need be. Gradients are not saved.
    Raises ReplicaError, on every rank, for an optimizer of something else.
    """
    state = _of_module(sharded)
    if optimizer is not None:
        for flat in _stepped(sharded, optimizer):
            for key, value in optimizer.state.get(flat.shard, {}).items():
                if isinstance(value, Tensor):
                    state[_key(flat, key)] = _saved(sharded, flat, value)
        state[OPTIONS] = json.dumps(_groups(sharded, optimizer))
    group = sharded.comm.group
    dcp.save(state, checkpoint_id=folder, process_group=group)


def load(
    folder: str | Path,
    sharded: ShardedModule,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Read what `save` has written, on any number of ranks; called by all of them.

    Raises ReplicaError, on every rank and before anything is changed, if the folder
    holds no such checkpoint, or one of another model, other units or other groups.
    """
    group, state = sharded.comm.group, _of_module(sharded)
    flats = [] if optimizer is None else _stepped(sharded, optimizer)
    saved: Mapping[str, Any] = {}
    try:
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        problem = _unlike(saved, state, optimizer is not None)
    except Exception as error:  # whatever is in that folder
        problem = f"{folder} holds no checkpoint that can be read: {error!r}"
    check_same({}, problem, sharded.process_group)
    if optimizer is not None:
        options = {OPTIONS: ""}
        dcp.load(options, checkpoint_id=folder, process_group=group)
        groups = json.loads(options[OPTIONS])
        here = [told["flats"] for told in _groups(sharded, optimizer)]
        there = [told["flats"] for told in groups]
        same = here == there
        problem = f"the optimizer's groups are {here}; the checkpoint's are {there}"
        check_same({}, None if same else problem, sharded.process_group)
    states = {flat.plan.name: _empty_states(saved, flat) for flat in flats}
    for flat in flats:
        for key, value in states[flat.plan.name].items():
            state[_key(flat, key)] = _saved(sharded, flat, value)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    # Tensors were read into place; what else a state dict holds is in the dict.
    if optimizer is not None:
        _go_on(optimizer, flats, states, groups)


# ---- tensors -------------------------------------------------------------------------


def _of_module(sharded: ShardedModule) -> dict[str, Tensor]:
    """Return what is saved of the module, by name; loading reads into it."""
    buffers = full_state.buffers(sharded)
    state = {f"buffer/{key}": buffer for key, buffer in buffers.items()}
    for flat in sharded.flats.values():
        state[f"shard/{flat.plan.name}"] = _saved(sharded, flat, flat.shard.detach())
    return state


def _saved(sharded: ShardedModule, flat: LiveFlat, tensor: Tensor) -> Tensor:
    """Return what lies in shards as a DTensor, without padding; others as they are."""
    if tensor.shape != flat.shard.shape:
        return tensor
    comm, numel = sharded.comm, flat.plan.numel
    mesh = DeviceMesh.from_group(comm.group, tensor.device.type)
    own = tensor[: max(0, numel - comm.rank * tensor.numel())]
    whole = {"shape": torch.Size([numel]), "stride": (1,)}
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, **whole)


def _unlike(
    saved: Mapping[str, Any], wanted: Mapping[str, Tensor], optimizer: bool
) -> str | None:
    """Return why a checkpoint does not fit, or None."""
    for key, tensor in wanted.items():
        if key not in saved:
            return f"the checkpoint has no {key}; it has {', '.join(list(saved)[:5])}"
        if saved[key].size != tensor.shape:
            return (
                f"the checkpoint's {key} has {saved[key].size.numel()} elements; here "
                f"it has {tensor.numel()}"
            )
    more = [k for k in saved if not k.startswith("optimizer/") and k not in wanted]
    if more:
        return f"the checkpoint has {more[0]}, which is not here"
    if optimizer and OPTIONS not in saved:
        return "the checkpoint has no optimizer"
    return None


# ---- the optimizer -------------------------------------------------------------------


def _key(flat: LiveFlat, state: str) -> str:
    return f"optimizer/{flat.plan.name}/{state}"


def _stepped(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer
) -> list[LiveFlat]:
    """Return the flats that the optimizer steps; raise ReplicaError, on all ranks."""
    flats, problem = [], None
    try:
        flats = full_state.stepped(sharded, optimizer)
    except ValueError as error:
        problem = str(error)
    check_same({}, problem, sharded.process_group)
    return flats


def _groups(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer
) -> list[dict[str, Any]]:
    """Return of each group which flats it steps, and its options."""
    names = {flat.shard: name for name, flat in sharded.flats.items()}
    groups = []
    for group in optimizer.param_groups:
        options = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        flats = [names[shard] for shard in group["params"]]
        groups.append({"flats": flats, "options": options})
    return groups


def _empty_states(saved: Mapping[str, Any], flat: LiveFlat) -> dict[str, Tensor]:
    """Return memory for the states of a flat that a checkpoint has."""
    start, states = _key(flat, ""), {}
    for key, entry in saved.items():
        if key.startswith(start) and isinstance(entry, TensorStorageMetadata):
            sharded = entry.size == torch.Size([flat.plan.numel])
            like = flat.shard.shape if sharded else entry.size
            states[key.removeprefix(start)] = torch.zeros(
                like, dtype=entry.properties.dtype, device=flat.shard.device
            )
    return states


def _go_on(
    optimizer: torch.optim.Optimizer,
    flats: list[LiveFlat],
    states: Mapping[str, dict[str, Tensor]],
    groups: list[dict[str, Any]],
) -> None:
    """Give an optimizer its states and options; PyTorch puts them where it wants."""
    own = optimizer.state_dict()
    kept = [states[flat.plan.name] for flat in flats]
    own["state"] = {number: state for number, state in enumerate(kept) if state}
    for group, told in zip(own["param_groups"], groups, strict=True):
        for key, value in told["options"].items():
            now = group.get(key)
            if isinstance(now, Tensor):
                value = torch.full_like(now, value)
            group[key] = tuple(value) if isinstance(now, tuple) else value
    optimizer.load_state_dict(own)
