"""Which parameters are gathered together: the units of stage 3, as plain data.

Whole parameters are needed only where they are computed with, one layer after the
other. So the model is divided into *units*: each is gathered just before its forward,
freed after it, and the same again in backward. The blocks of a transformer are units;
what is left, embedding and head, is the *root* unit, which stays from the beginning of
a forward or backward to its end.

    unit blocks.0        | norm1.weight | norm1.bias | attn.qkv.weight | ... | . .|
    shard of rank        |        0          |         1         |        2       |

A unit's parameters lie side by side in one flat tensor, and each rank owns 1/N of its
elements, wherever the cuts may fall (`shards`). Parameters of several types, and frozen
ones, which need no gradient, are flat tensors of their own: *flats* of the same unit.
What they have in memory, and when, is in `unit_storage`.

Zhao et al. 2023, "PyTorch FSDP", sections 3.2.1 and 4.2. Chapter 08.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddp_course.mechanisms.buckets import Bucket
from ddp_course.zero.shards import Piece, ShardedBucket

ROOT = "root"

Chosen = Iterable["nn.Module | str"] | Callable[[str, nn.Module], bool] | None


@dataclass(frozen=True)
class FlatPlan:
    """Parameters of a unit that have one type: element k of all is in one shard.

    Attributes:
        name: of the unit, and what tells this one from the unit's others.
        trainable: whether they have gradients.
        sharded: where each parameter begins, and who owns what.
    """

    name: str
    trainable: bool
    sharded: ShardedBucket

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return what `rank` owns of each parameter, which may be nothing, in order."""
        bucket, length = self.sharded.bucket, self.sharded.shard_numel
        edges = [edge - rank * length for edge in (*bucket.offsets, bucket.numel)]
        inside = [min(max(edge, 0), length) for edge in edges]  # of the rank's shard
        return tuple(
            Piece(name, inside[k] - edges[k], inside[k + 1] - edges[k], inside[k])
            if inside[k] < inside[k + 1]
            else Piece(name, 0, 0, inside[k])
            for k, name in enumerate(bucket.parameters)
        )

    def __str__(self) -> str:
        """One line for a reader."""
        bucket, plan = self.sharded.bucket, self.sharded
        dtype = str(bucket.dtype).removeprefix("torch.")
        count = len(bucket.parameters)
        return (
            f"{self.name}: {bucket.numel:,} {dtype} elements of {count} "
            f"{'' if self.trainable else 'frozen '}parameter{'s' * (count > 1)}, "
            f"{plan.world_size} x {plan.shard_numel:,} with {plan.padding} of padding"
        )


@dataclass(frozen=True)
class UnitPlan:
    """Parameters that are gathered and freed together: those of one module.

    Attributes:
        index: its place in the plan; the root unit is number 0.
        name: of the module, or "root".
        flats: one for each type of its parameters; most often one. Of the root unit
            there may be none.
    """

    index: int
    name: str
    flats: tuple[FlatPlan, ...]

    def encloses(self, other: UnitPlan) -> bool:
        """Tell whether the module of `other` is this one's, or inside of it."""
        return self.name == ROOT or f"{other.name}.".startswith(f"{self.name}.")

    @property
    def numel(self) -> int:
        """Elements of all shards of all ranks, padding included."""
        return sum(flat.sharded.numel for flat in self.flats)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, gathered in their own types, padding included."""
        return sum(flat.sharded.nbytes for flat in self.flats)

    def __str__(self) -> str:
        """A line for each flat."""
        return "\n".join(map(str, self.flats)) or f"{self.name}: nothing"


def unit_plan(
    module: nn.Module, world_size: int, units: Chosen = None
) -> tuple[UnitPlan, ...]:
    """Divide the parameters of `module` into units, the root first, each into shards.

    Pure: reads names, shapes and types only. A parameter belongs to the innermost
    chosen module that it is in; one that is in several, such as a tied weight, to the
    root, and so do all that are in none.

    Args:
        module: the whole model.
        world_size: the number of ranks.
        units: modules, or names of modules, or `choose(name, module) -> bool`; None are
            the modules in `nn.ModuleList`s, which is where a transformer has its blocks
            (in PyTorch, one calls `fully_shard` on each of them).

    Raises ValueError for a unit that is no module of `module`. Chapter 08.
    """
    homes: dict[Tensor, set[str]] = {}  # parameter -> the units it is in
    chosen = {id(unit): name for name, unit in _chosen(module, units)}
    for parameter, home in _walk(module, ROOT, chosen):
        homes.setdefault(parameter, set()).add(home)
    members: dict[str, list[tuple[str, Tensor]]] = {ROOT: []}
    members |= {name: [] for name in chosen.values()}
    for name, parameter in module.named_parameters():
        (home, *others) = homes[parameter]
        members[ROOT if others else home].append((name, parameter))
    filled = {k: m for k, m in members.items() if m or k == ROOT}
    return tuple(
        UnitPlan(index, name, tuple(_flats(name, pairs, world_size)))
        for index, (name, pairs) in enumerate(filled.items())
    )


def _walk(
    module: nn.Module, home: str, chosen: dict[int, str]
) -> Iterator[tuple[Tensor, str]]:
    """Yield every parameter and the innermost unit, at each place where it is."""
    home = chosen.get(id(module), home)
    for parameter in module.parameters(recurse=False):
        yield parameter, home
    for child in module.children():
        yield from _walk(child, home, chosen)


def _chosen(module: nn.Module, units: Chosen) -> list[tuple[str, nn.Module]]:
    """Return the names and modules of the units, in the order of the model."""
    named = {name: child for name, child in module.named_modules() if name}
    if units is None:
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
        inside = {id(child) for each in lists for child in each}
        # A list in a list is no unit: it is never called.
        callable_ones = [
            c for c in named.items() if not isinstance(c[1], nn.ModuleList)
        ]
        return [(name, child) for name, child in callable_ones if id(child) in inside]
    if callable(units) and not isinstance(units, nn.Module):
        return [(name, child) for name, child in named.items() if units(name, child)]
    if isinstance(units, (str, nn.Module)) or not isinstance(units, Iterable):
        raise ValueError(
            f"units is {_told(units)}; it can be a list of modules or names, a "
            "function (name, module) -> bool, or None"
        )
    wanted: set[int] = set()
    for unit in units:
        found = named.get(unit) if isinstance(unit, str) else unit
        if not any(found is child for child in named.values()):
            raise ValueError(
                f"units has {_told(unit)}, which is no module of this model; its "
                f"modules are {', '.join(list(named)[:8])}{', ...' * (len(named) > 8)}"
            )
        wanted.add(id(found))
    return [(name, child) for name, child in named.items() if id(child) in wanted]


def _told(unit: object) -> str:
    return f"a {type(unit).__name__}" if isinstance(unit, nn.Module) else repr(unit)


def _flats(
    unit: str, members: list[tuple[str, Tensor]], world_size: int
) -> Iterator[FlatPlan]:
    """Lay the parameters of a unit side by side, those of one type together."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[tuple[str, Tensor]]] = {}
    for name, parameter in members:
        kind = parameter.dtype, parameter.device, parameter.requires_grad
        kinds.setdefault(kind, []).append((name, parameter))
    for index, ((dtype, device, trainable), pairs) in enumerate(kinds.items()):
        offsets, numel = [], 0
        for _, parameter in pairs:
            offsets.append(numel)
            numel += parameter.numel()
        told = unit
        if len(kinds) > 1:
            told += f".{str(dtype).removeprefix('torch.')}" + ".frozen" * (
                not trainable
            )
        names = tuple(name for name, _ in pairs)
        bucket = Bucket(index, names, tuple(offsets), numel, dtype, device)
        yield FlatPlan(told, trainable, ShardedBucket(bucket, world_size))
