"""Sharded checkpoints: every rank writes its own part, and any number of ranks reads.

    save(folder, fsdp, optimizer)      on 4 ranks
    load(folder, fsdp, optimizer)      on 4, 3, 2 or 1

No rank ever has a whole model, so none could write it. Each writes a file with its
pieces and their states, and which elements of which parameter they are:

    folder/00000001/rank-0.pt          head.out.weight   [0, 3456) of 13824   ...
                    rank-1.pt          head.out.weight   [3456, 6912)         ...

A rank that loads looks into all files for the elements that it now owns. So units and
ranks may be others then. A save is a new folder: it has another name until all ranks
have written, and the one before it stays until then (`mechanisms.saving`). What another
parallelism has cut before is told by its placement, and must be cut alike by those who
load. torch.distributed.checkpoint does all that for DTensors. Chapter 08.
"""

import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.assembly import options_of
from ddp_course.mechanisms.placements import Flat, placed
from ddp_course.mechanisms.saving import (
    WRITING,
    CheckpointError,
    left_overs,
    read,
    rename,
    seal,
    unsealed,
    write_whole,
)
from ddp_course.mechanisms.states import on_cpu
from ddp_course.mechanisms.whole_state import buffers_of
from ddp_course.zero.stage3 import FullyShardedDataParallel as ShardedModule

T = TypeVar("T")
FORMAT = 1
NUMBERS = "numbers"  # of a piece, among its optimizer's states


def save(
    folder: str | Path, sharded: ShardedModule, optimizer: Optimizer | None = None
) -> None:
    """Write pieces, buffers and the optimizer's states; called by all ranks.

    `folder` is one that all ranks see; it is made if need be. Gradients are not saved.
    Of replicas, the first ones write. Raises CheckpointError, on every rank, for an
    optimizer of something else, and if it cannot be written; what was there stays.
    """
    groups, folder = _groups(sharded), Path(folder).absolute()
    first = all(dist.get_rank(group) == 0 for group in groups)
    writes = all(dist.get_rank(group) == 0 for group in sharded.replica_groups)

    def write() -> None:
        state = {"format": FORMAT, "save": names[0], **_own(sharded, optimizer)}
        write_whole(state, unfinished / f"rank-{dist.get_rank()}.pt")

    _agreed(groups, lambda: _check_stepped(sharded, optimizer))
    names = _agreed(groups, lambda: _begin(folder) if first else None)
    names = from_first(names, groups)
    unfinished, path = (folder / name for name in names)
    _agreed(groups, lambda: write() if writes else None)
    _agreed(groups, lambda: _end(unfinished, path) if first else None)


def load(
    folder: str | Path, sharded: ShardedModule, optimizer: Optimizer | None = None
) -> None:
    """Read what `save` has written, on any number of ranks; called by all of them.

    Raises CheckpointError, on every rank and before anything is changed, if the folder
    holds no such checkpoint, or one of another model or other groups.
    """
    groups, folder = _groups(sharded), Path(folder).absolute()
    _agreed(groups, lambda: _check_stepped(sharded, optimizer))
    newest = from_first(max(_saves(folder), default=None), groups)
    found = _agreed(groups, lambda: _found(newest or folder, sharded, optimizer))
    states, buffers, options = found
    with torch.no_grad():
        for piece, state in states.items():
            piece.copy_(state.pop(NUMBERS))
        for buffer, value in buffers:
            buffer.copy_(value)
    if optimizer is not None:
        _go_on(optimizer, states, options)


def _groups(sharded: ShardedModule) -> list[dist.ProcessGroup]:
    """Return the groups along which there are other ranks with a part in this."""
    return list(dict.fromkeys([*sharded.groups, *sharded.replica_groups]))


def _agreed(groups: list[dist.ProcessGroup], make: Callable[[], T]) -> T:
    """Return `make()`, or raise CheckpointError on all ranks if one cannot make it."""
    return agreed(make, *groups, error=CheckpointError)


def from_first(value: Any, groups: list[dist.ProcessGroup]) -> Any:
    """Return on all ranks what the first rank along all groups has."""
    for group in groups:
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group)
        (value,) = box
    return value


# ---- to write ------------------------------------------------------------------------


def _saves(folder: Path) -> list[Path]:
    """Return the complete saves in a folder."""
    return [path for path in folder.glob("[0-9]*") if path.is_dir()]


def _begin(folder: Path) -> tuple[str, str]:
    """Make a folder for a new save; return its name, and the one it will have."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in left_overs(folder):
        shutil.rmtree(left_over, ignore_errors=True)
    unfinished = f"{WRITING}{os.getpid()}-{secrets.token_hex(8)}"
    (folder / unfinished).mkdir()
    number = max((int(path.name) for path in _saves(folder)), default=0) + 1
    return unfinished, f"{number:08d}"


def _end(unfinished: Path, path: Path) -> None:
    """Give a save its name; those before it are not needed any more."""
    rename(unfinished, path)
    for old in _saves(path.parent):
        if old != path:
            shutil.rmtree(old, ignore_errors=True)


def _own(sharded: ShardedModule, optimizer: Optimizer | None) -> dict[str, Any]:
    pieces = {}
    for name, piece in sharded.pieces.items():
        state = {} if optimizer is None else optimizer.state.get(piece, {})
        tensors = {k: v for k, v in state.items() if isinstance(v, Tensor)}
        tensors = {NUMBERS: piece, **tensors}
        pieces[_key(name, piece)] = {
            "elements": (_range(piece).first, _range(piece).last, _numel(piece)),
            "states": {k: seal(on_cpu(v).clone()) for k, v in tensors.items()},
        }
    buffers = {key: seal(on_cpu(b)) for key, b in buffers_of(sharded).items()}
    options = None if optimizer is None else on_cpu(_options(sharded, optimizer))
    return {"pieces": pieces, "buffers": buffers, "options": seal(options)}


def _range(piece: Tensor) -> Flat:
    return placed(piece).steps[-1].placement


def _numel(piece: Tensor) -> int:
    return torch.Size(placed(piece).steps[-1].shape).numel()


def _key(name: str, piece: Tensor) -> str:
    """Return the name of what was cut into pieces: a part, if it was cut before."""
    before = "; ".join(map(str, placed(piece).steps[:-1]))
    return f"{name} ({before})" if before else name


def _check_stepped(sharded: ShardedModule, optimizer: Optimizer | None) -> None:
    """Raise CheckpointError for an optimizer that steps other tensors, too."""
    own = set(sharded.pieces.values())
    groups = [] if optimizer is None else optimizer.param_groups
    others = [[*p.shape] for group in groups for p in group["params"] if p not in own]
    if others:
        raise CheckpointError(
            f"the optimizer steps tensors of {others}, no pieces of this module"
        )


def _options(sharded: ShardedModule, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return of each group the names of what it steps, and its options."""
    names = {piece: name for name, piece in sharded.pieces.items()}
    return [
        {"names": [names[p] for p in group["params"]], "options": options_of(group)}
        for group in optimizer.param_groups
    ]


# ---- to read -------------------------------------------------------------------------


def _found(
    folder: Path, sharded: ShardedModule, optimizer: Optimizer | None
) -> tuple[dict[Tensor, dict[str, Tensor]], list[tuple[Tensor, Tensor]], Any]:
    """Return all states of the own pieces, the buffers, and the optimizer's options."""
    files = [read(path, FORMAT, mmap=True) for path in sorted(folder.glob("rank-*"))]
    if not files:
        raise CheckpointError(f"{folder} holds no checkpoint")
    try:
        if len({file["save"] for file in files}) > 1:
            raise CheckpointError("its files are of several saves")
        options = unsealed(files[0]["options"])
        _check_alike(files, sharded, optimizer, options)
        states = {
            piece: _assembled(files, _key(name, piece), piece, optimizer is not None)
            for name, piece in sharded.pieces.items()
        }
        saved = files[0]["buffers"]
        buffers = [(b, unsealed(saved[key])) for key, b in buffers_of(sharded).items()]
    except (CheckpointError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {error}") from None
    return states, buffers, options


def _check_alike(
    files: list[Mapping[str, Any]],
    sharded: ShardedModule,
    optimizer: Optimizer | None,
    options: Any,
) -> None:
    """Raise CheckpointError if it is of another model, or of other groups."""
    saved = {key: own for file in files for key, own in file["pieces"].items()}
    for name, piece in sharded.pieces.items():
        if (key := _key(name, piece)) not in saved:
            raise CheckpointError(f"it has no {key}, but {', '.join(list(saved)[:5])}")
        here, there = _numel(piece), saved[key]["elements"][2]
        if there != here:
            raise CheckpointError(f"its {key} has {there} elements; here it has {here}")
    names = {key.partition(" ")[0] for key in saved} | {*files[0]["buffers"]}
    here = {*sharded.pieces, *buffers_of(sharded)}
    if names != here:
        raise CheckpointError(f"only one side has {', '.join(sorted(names ^ here))}")
    if optimizer is not None:
        if options is None:
            raise CheckpointError("it has no optimizer")
        own = [group["names"] for group in _options(sharded, optimizer)]
        there = [group["names"] for group in options]
        if own != there:
            raise CheckpointError(f"the optimizer's groups are {own}, there {there}")


def _assembled(
    files: list[Mapping[str, Any]], key: str, piece: Tensor, with_states: bool
) -> dict[str, Tensor]:
    """Return the numbers of a piece, and the states of it, from all files."""
    parts = [file["pieces"][key] for file in files if key in file["pieces"]]
    names = dict.fromkeys(name for part in parts for name in part["states"])
    return {
        name: _elements(parts, name, key, _range(piece))
        for name in (names if with_states else [NUMBERS])
    }


def _elements(
    parts: list[Mapping[str, Any]], name: str, key: str, wanted: Flat
) -> Tensor:
    """Return the elements of a state that are wanted, from all parts that have some."""
    found, missing = None, wanted.last - wanted.first
    for part in (part for part in parts if name in part["states"]):
        first, last, _ = part["elements"]
        begin, end = max(first, wanted.first), min(last, wanted.last)
        sealed = part["states"][name]
        if sealed["value"].dim() == 0:  # such as "step": the same for all
            return unsealed(sealed).clone()
        if found is None:
            found = sealed["value"].new_zeros(missing)
        if begin < end:
            numbers = unsealed(sealed)[begin - first : end - first]
            found[begin - wanted.first : end - wanted.first] = numbers
            missing -= end - begin
    if missing:
        raise CheckpointError(f"of {key} ({name}) {missing} elements are in no file")
    return found


def _go_on(
    optimizer: Optimizer,
    states: Mapping[Tensor, dict[str, Tensor]],
    options: list[dict[str, Any]],
) -> None:
    """Give an optimizer its states and options; PyTorch puts them where it wants."""
    own = optimizer.state_dict()
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    own["state"] = {k: states[p] for k, p in enumerate(stepped) if states[p]}
    for group, told in zip(own["param_groups"], options, strict=True):
        for key, value in told["options"].items():
            tuples = isinstance(group.get(key), tuple)  # they were saved as lists
            group[key] = tuple(value) if tuples else value
    optimizer.load_state_dict(own)
