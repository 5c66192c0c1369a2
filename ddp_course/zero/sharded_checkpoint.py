"""Sharded checkpoints: every rank writes its own part, and any number of ranks reads.

    save(folder, fsdp, optimizer)      on 4 ranks
    load(folder, fsdp, optimizer)      on 4, 3, 2 or 1

No rank ever has a whole model, so no rank could write one. Each rank writes a file with
its pieces and their states, and records which elements of which parameter they are:

    folder/00000001/rank-0.pt          head.out.weight   [0, 3456) of 13824   ...
                    rank-1.pt          head.out.weight   [3456, 6912)         ...

A rank that loads searches all files for the elements that it owns now. So the number of
ranks and the units may differ between save and load. Each save goes into a new folder,
which has a temporary name until all ranks have written; only then is the previous save
deleted (`mechanisms.saving`). If another parallelism has cut a tensor before, its
placement is part of the key, and the ranks that load must have cut it in the same way.
torch.distributed.checkpoint does all that for DTensors. Chapter 08.
"""

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
    CheckpointError,
    find_abandoned,
    read_whole,
    rename,
    seal,
    unfinished_name,
    unseal,
    write_whole,
)
from ddp_course.mechanisms.states import on_cpu
from ddp_course.mechanisms.whole_state import buffers_of
from ddp_course.zero.stage3 import FullyShardedDataParallel as ShardedModule

T = TypeVar("T")
FORMAT = 1
NUMBERS = "numbers"  # key of a piece's own values beside its optimizer states


def save(
    folder: str | Path, sharded: ShardedModule, optimizer: Optimizer | None = None
) -> None:
    """Write pieces, buffers and the optimizer's states; all ranks must call it.

    All ranks must see the same `folder`, which is created if it does not exist.
    Gradients are not saved. If there are replicas, only the first one writes. Raises
    CheckpointError, on every rank, if the optimizer steps other tensors or if a file
    cannot be written; the previous save is kept then.
    """
    groups, folder = _groups(sharded, optimizer), Path(folder).absolute()
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
    """Load the newest save in `folder` on any number of ranks; all must call it.

    Raises CheckpointError, on every rank and before anything is changed, if the folder
    has no such checkpoint, or one of another model or other parameter groups.
    """
    groups, folder = _groups(sharded, optimizer), Path(folder).absolute()
    _agreed(groups, lambda: _check_stepped(sharded, optimizer))
    newest = from_first(max(_saves(folder), default=None), groups)
    states, buffers, options = _agreed(
        groups, lambda: _read_own(newest or folder, sharded, optimizer)
    )
    with torch.no_grad():
        for piece, state in states.items():
            piece.copy_(state.pop(NUMBERS))
        for buffer, value in buffers:
            buffer.copy_(value)
    if optimizer is not None:
        _load_optimizer(optimizer, states, options)


def _groups(
    sharded: ShardedModule, optimizer: Optimizer | None
) -> list[dist.ProcessGroup]:
    """Return the groups that divide or replicate the module."""
    if not isinstance(sharded, ShardedModule):
        must = "it must be a FullyShardedDataParallel module"
        raise ValueError(f"sharded is of type {type(sharded).__name__}; {must}")
    if not isinstance(optimizer, Optimizer | None):
        must = "it must be the optimizer of the module's parameters, or None"
        raise ValueError(f"optimizer is of type {type(optimizer).__name__}; {must}")
    return list(dict.fromkeys([*sharded.groups, *sharded.replica_groups]))


def _agreed(groups: list[dist.ProcessGroup], make: Callable[[], T]) -> T:
    """Return `make()`, or raise CheckpointError on all ranks if it fails on one."""
    return agreed(make, *groups, error=CheckpointError)


def from_first(value: Any, groups: list[dist.ProcessGroup]) -> Any:
    """Return, on all ranks, the `value` of the first rank along all groups."""
    for group in groups:
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group)
        (value,) = box
    return value


# ---- write ---------------------------------------------------------------------------


def _saves(folder: Path) -> list[Path]:
    """Return the complete saves in a folder."""
    return [path for path in folder.glob("[0-9]*") if path.is_dir()]


def _begin(folder: Path) -> tuple[str, str]:
    """Create a folder for a new save; return its temporary and its final name."""
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in find_abandoned(folder):
        shutil.rmtree(left_over, ignore_errors=True)
    unfinished = unfinished_name()
    (folder / unfinished).mkdir()
    number = max((int(path.name) for path in _saves(folder)), default=0) + 1
    return unfinished, f"{number:08d}"


def _end(unfinished: Path, path: Path) -> None:
    """Rename a finished save to its final name, and delete the earlier saves."""
    rename(unfinished, path)
    for old in _saves(path.parent):
        if old != path:
            shutil.rmtree(old, ignore_errors=True)


def _own(sharded: ShardedModule, optimizer: Optimizer | None) -> dict[str, Any]:
    pieces = {}
    for name, piece in sharded.pieces.items():
        state = {} if optimizer is None else optimizer.state.get(piece, {})
        values = {NUMBERS: piece, **state}
        pieces[_key(name, piece)] = {
            "elements": (_range(piece).first, _range(piece).last, _numel(piece)),
            "states": {k: seal(_copy(v)) for k, v in values.items()},
        }
    buffers = {key: seal(on_cpu(b)) for key, b in buffers_of(sharded).items()}
    options = None if optimizer is None else on_cpu(_options(sharded, optimizer))
    return {"pieces": pieces, "buffers": buffers, "options": seal(options)}


def _copy(value: Any) -> Any:
    """Return a tensor's copy on the CPU; a state may also be a plain number."""
    return on_cpu(value).clone() if isinstance(value, Tensor) else value


def _range(piece: Tensor) -> Flat:
    return placed(piece).steps[-1].placement


def _numel(piece: Tensor) -> int:
    return torch.Size(placed(piece).steps[-1].shape).numel()


def _key(name: str, piece: Tensor) -> str:
    """Return the key of a piece: its parameter's name and earlier placements."""
    before = "; ".join(map(str, placed(piece).steps[:-1]))
    return f"{name} ({before})" if before else name


def _check_stepped(sharded: ShardedModule, optimizer: Optimizer | None) -> None:
    """Raise CheckpointError if the optimizer steps tensors that are no pieces."""
    own = set(sharded.pieces.values())
    groups = [] if optimizer is None else optimizer.param_groups
    others = [[*p.shape] for group in groups for p in group["params"] if p not in own]
    if others:
        raise CheckpointError(
            f"the optimizer steps tensors of the shapes {others}, which are no pieces "
            f"of this module; pass the optimizer that steps its parameters()"
        )


def _options(sharded: ShardedModule, optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return, for each group, the names of its parameters and its options."""
    names = {piece: name for name, piece in sharded.pieces.items()}
    return [
        {"names": [names[p] for p in group["params"]], "options": options_of(group)}
        for group in optimizer.param_groups
    ]


# ---- read ----------------------------------------------------------------------------


def _read_own(
    folder: Path, sharded: ShardedModule, optimizer: Optimizer | None
) -> tuple[dict[Tensor, dict[str, Any]], list[tuple[Tensor, Tensor]], Any]:
    """Return the states of this rank's pieces, the buffers, the optimizer's options."""
    files = [
        read_whole(path, FORMAT, mmap=True) for path in sorted(folder.glob("rank-*"))
    ]
    if not files:
        raise CheckpointError(f"{folder} has no checkpoint (no file rank-*.pt)")
    try:
        if len({file["save"] for file in files}) > 1:
            raise CheckpointError("its files are from several saves")
        options = unseal(files[0]["options"])
        _check_fits(files, sharded, optimizer, options)
        states = {
            piece: _assembled(files, _key(name, piece), piece, optimizer is not None)
            for name, piece in sharded.pieces.items()
        }
        saved = files[0]["buffers"]
        buffers = [(b, unseal(saved[key])) for key, b in buffers_of(sharded).items()]
    except (CheckpointError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} cannot be loaded: {error}") from None
    return states, buffers, options


def _check_fits(
    files: list[Mapping[str, Any]],
    sharded: ShardedModule,
    optimizer: Optimizer | None,
    options: Any,
) -> None:
    """Raise CheckpointError if the files are of another model or other groups."""
    saved = {key: own for file in files for key, own in file["pieces"].items()}
    for name, piece in sharded.pieces.items():
        if (key := _key(name, piece)) not in saved:
            raise CheckpointError(
                f"the module has {key}; the checkpoint has no such parameter, but has "
                f"{', '.join(list(saved)[:5])}"
            )
        numel, saved_numel = _numel(piece), saved[key]["elements"][2]
        if saved_numel != numel:
            raise CheckpointError(
                f"{key} has {saved_numel} elements in the checkpoint, and {numel} in "
                f"the module"
            )
    saved_names = {key.partition(" ")[0] for key in saved} | {*files[0]["buffers"]}
    own_names = {*sharded.pieces, *buffers_of(sharded)}
    if saved_names != own_names:
        only = ", ".join(sorted(saved_names ^ own_names))
        raise CheckpointError(f"only the checkpoint, or only the module, has {only}")
    if optimizer is not None:
        if options is None:
            raise CheckpointError(
                "it has no optimizer states; load it without an optimizer"
            )
        own_groups = [group["names"] for group in _options(sharded, optimizer)]
        saved_groups = [group["names"] for group in options]
        if own_groups != saved_groups:
            raise CheckpointError(
                f"the optimizer's groups are {own_groups}, the checkpoint's groups "
                f"{saved_groups}"
            )


def _assembled(
    files: list[Mapping[str, Any]], key: str, piece: Tensor, with_states: bool
) -> dict[str, Any]:
    """Assemble the values of a piece, and its states, from all files."""
    parts = [file["pieces"][key] for file in files if key in file["pieces"]]
    names = dict.fromkeys(name for part in parts for name in part["states"])
    return {
        name: _elements(parts, name, key, _range(piece))
        for name in (names if with_states else [NUMBERS])
    }


def _elements(parts: list[Mapping[str, Any]], name: str, key: str, target: Flat) -> Any:
    """Return the range `target` of one state, copied from the parts that overlap it."""
    elements, missing = None, target.last - target.first
    for part in (part for part in parts if name in part["states"]):
        first, last, _ = part["elements"]
        begin, end = max(first, target.first), min(last, target.last)
        sealed = part["states"][name]
        value = sealed["value"]
        if not isinstance(value, Tensor) or value.dim() == 0:
            return _copy(unseal(sealed))  # such as "step": equal in all parts
        if elements is None:
            elements = value.new_zeros(missing)
        if begin < end:
            numbers = unseal(sealed)[begin - first : end - first]
            elements[begin - target.first : end - target.first] = numbers
            missing -= end - begin
    if missing:
        raise CheckpointError(f"{missing} elements of {key} ({name}) are in no file")
    return elements


def _load_optimizer(
    optimizer: Optimizer,
    states: Mapping[Tensor, dict[str, Any]],
    options: list[dict[str, Any]],
) -> None:
    """Load states and options into an optimizer, by its own `load_state_dict`."""
    own = optimizer.state_dict()
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    own["state"] = {k: states[p] for k, p in enumerate(stepped) if states[p]}
    for group, saved in zip(own["param_groups"], options, strict=True):
        for key, value in saved["options"].items():
            is_tuple = isinstance(group.get(key), tuple)  # files have lists instead
            group[key] = tuple(value) if is_tuple else value
    optimizer.load_state_dict(own)
