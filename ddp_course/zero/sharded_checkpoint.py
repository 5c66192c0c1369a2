"""Sharded checkpoints: every rank writes its own part, and any number of ranks reads.

    save(folder, fsdp, optimizer)      on 4 ranks
    load(folder, fsdp, optimizer)      on 4, 3, 2 or 1

No rank ever has a whole model, so none could write it. The files are those of
torch.distributed.checkpoint, DCP: each rank's tensors, and beside them one file that
says which elements of which tensor are where. A rank that loads reads those that it now
owns, from whichever files they are in.

Saved are the parameters by their plain names, and the optimizer's states of each, as
vectors in the order of the memory; a rank has the elements of its piece. So units and
ranks may be others when they are loaded. What another parallelism has cut before is a
model of its own, with a folder of its own. Chapter 08.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata as md
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ddp_course.mechanisms.agreement import check_same
from ddp_course.mechanisms.placements import Step, placed
from ddp_course.mechanisms.whole_state import options_of
from ddp_course.zero.sharded_module import ShardedModule

OPTIONS = "optimizer/options"  # what is no tensor, as text
State = dict[str, Any]


def save(
    folder: str | Path,
    sharded: ShardedModule,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Write pieces, buffers and the optimizer's states; called by all ranks.

    `folder` is one that all ranks see; it is made if need be. Gradients are not saved.
    Of replicas, the first ones write. Raises ReplicaError, on every rank, for an
    optimizer of something else.
    """
    state = _of_module(sharded)
    for name, piece in _stepped(sharded, optimizer).items():
        for key, value in optimizer.state.get(piece, {}).items():
            if isinstance(value, Tensor):
                state[f"optimizer/{name}/{key}"] = _part_of(piece, value)
    if optimizer is not None:
        state[OPTIONS] = json.dumps(_groups(sharded, optimizer))
    if all(comm.rank == 0 for comm in sharded.comms[1:]):
        dcp.save(state, checkpoint_id=folder, process_group=sharded.comm.group)
    for comm in sharded.comms[1:]:
        comm.agree_now("a sharded checkpoint has been saved")


def load(
    folder: str | Path,
    sharded: ShardedModule,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Read what `save` has written, on any number of ranks; called by all of them.

    Raises ReplicaError, on every rank and before anything is changed, if the folder
    holds no such checkpoint, or one of another model or other groups.
    """
    group, state = sharded.comm.group, _of_module(sharded)
    pieces, saved = _stepped(sharded, optimizer), {}
    try:
        saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        problem = _unlike(saved, state, optimizer is not None)
    except Exception as error:  # whatever is in that folder
        problem = f"{folder} holds no checkpoint that can be read: {error!r}"
    check_same({}, problem, group)
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        options = {OPTIONS: ""}
        dcp.load(options, checkpoint_id=folder, process_group=group)
        groups = json.loads(options[OPTIONS])
        here = [told["names"] for told in _groups(sharded, optimizer)]
        there = [told["names"] for told in groups]
        problem = f"the optimizer's groups are {here}; the checkpoint's are {there}"
        check_same({}, None if here == there else problem, group)
    states = {name: _empty_states(saved, name, p) for name, p in pieces.items()}
    for name, own in states.items():
        for key, value in own.items():
            state[f"optimizer/{name}/{key}"] = _part_of(pieces[name], value)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    # Tensors were read into place; what else a state dict holds is in the dict.
    if optimizer is not None:
        _go_on(optimizer, list(states.values()), groups)


# ---- tensors -------------------------------------------------------------------------


class Part(Tensor):
    """Some elements of a vector, as DCP takes any tensor that says where it belongs."""

    step: Step

    @property
    def chunk(self) -> md.ChunkStorageMetadata:
        """Which elements it has, of those of the whole."""
        first = self.step.placement.first
        return md.ChunkStorageMetadata(torch.Size([first]), torch.Size([self.numel()]))

    def size(self) -> torch.Size:
        """The shape of the whole vector."""
        return torch.Size([torch.Size(self.step.shape).numel()])

    def __create_write_items__(self, name: str, _: Tensor) -> list[WriteItem]:
        where = md.MetadataIndex(name, self.chunk.offsets)
        properties = md.TensorProperties.create_from_tensor(self.as_subclass(Tensor))
        data = TensorWriteData(self.chunk, properties, self.size())
        some = self.numel() > 0 or (not self.size().numel() and self.step.rank == 0)
        return [WriteItem(where, WriteItemType.SHARD, tensor_data=data)] * some

    def __create_chunk_list__(self) -> list[md.ChunkStorageMetadata]:
        return [self.chunk] * (self.numel() > 0)

    def __get_tensor_shard__(self, index: md.MetadataIndex) -> Tensor:
        return self.as_subclass(Tensor)


def _part_of(piece: Tensor, value: Tensor) -> Tensor:
    """Return what lies as a piece does as a Part; others, such as "step", as it is."""
    if value.dim() == 0:
        return value
    part = value.detach().as_subclass(Part)
    part.step = placed(piece).steps[-1]
    return part


def _of_module(sharded: ShardedModule) -> State:
    """Return what is saved of the module, by name; loading reads into it."""
    state = sharded.module.state_dict(keep_vars=True)
    buffers = [key for key, name in sharded.plain.keys.items() if name is None]
    told = {f"buffer/{key}": state[key] for key in buffers if key in state}
    for name, piece in sharded.pieces.items():
        told[f"parameter/{name}"] = _part_of(piece, piece)
    return told


def _unlike(
    saved: Mapping[str, Any], wanted: Mapping[str, Tensor], optimizer: bool
) -> str | None:
    """Return why a checkpoint does not fit, or None."""
    for key, tensor in wanted.items():
        if key not in saved:
            return f"the checkpoint has no {key}; it has {', '.join(list(saved)[:5])}"
        if saved[key].size != tensor.size():
            return (
                f"the checkpoint's {key} has {saved[key].size.numel()} elements; here "
                f"it has {tensor.size().numel()}"
            )
    more = [k for k in saved if not k.startswith("optimizer/") and k not in wanted]
    if more:
        return f"the checkpoint has {more[0]}, which is not here"
    if optimizer and OPTIONS not in saved:
        return "the checkpoint has no optimizer"
    return None


# ---- the optimizer -------------------------------------------------------------------


def _stepped(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer | None
) -> dict[str, Tensor]:
    """Return the pieces that it steps, in its order; raise ReplicaError, on all ranks.

    Without an optimizer, none.
    """
    names = {piece: name for name, piece in sharded.pieces.items()}
    groups = [] if optimizer is None else optimizer.param_groups
    stepped = [piece for group in groups for piece in group["params"]]
    strange = [[*piece.shape] for piece in stepped if piece not in names]
    problem = f"the optimizer steps tensors of {strange}, no pieces of this module"
    check_same({}, problem if strange else None, sharded.process_group)
    return {names[piece]: piece for piece in stepped}


def _groups(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer
) -> list[dict[str, Any]]:
    """Return of each group the names of what it steps, and its options."""
    names = {piece: name for name, piece in sharded.pieces.items()}
    return [
        {
            "names": [names[piece] for piece in group["params"]],
            "options": {
                key: value.item() if isinstance(value, Tensor) else value
                for key, value in options_of(group).items()
            },
        }
        for group in optimizer.param_groups
    ]


def _empty_states(
    saved: Mapping[str, Any], name: str, piece: Tensor
) -> dict[str, Tensor]:
    """Return memory for those states of a piece that a checkpoint has."""
    start, states = f"optimizer/{name}/", {}
    for key, entry in saved.items():
        if key.startswith(start) and isinstance(entry, md.TensorStorageMetadata):
            like = piece.shape if len(entry.size) else entry.size
            states[key.removeprefix(start)] = torch.zeros(
                like, dtype=entry.properties.dtype, device=piece.device
            )
    return states


def _go_on(
    optimizer: torch.optim.Optimizer,
    states: list[dict[str, Tensor]],
    groups: list[dict[str, Any]],
) -> None:
    """Give an optimizer its states and options; PyTorch puts them where it wants."""
    own = optimizer.state_dict()
    own["state"] = {number: state for number, state in enumerate(states) if state}
    for group, told in zip(own["param_groups"], groups, strict=True):
        for key, value in told["options"].items():
            now = group.get(key)
            if isinstance(now, Tensor):
                value = torch.full_like(now, value)
            group[key] = tuple(value) if isinstance(now, tuple) else value
    optimizer.load_state_dict(own)
