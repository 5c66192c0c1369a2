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

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from torch import Tensor, nn

from ddp_course.mechanisms.buckets import Bucket
from ddp_course.zero.shards import ShardedBucket

ROOT = "root"

Chosen = Iterable[str] | None


@dataclass(frozen=True)
class FlatPlan(ShardedBucket):
    """Parameters of a unit that have one type, side by side: rank r owns shard r.

    Attributes:
        name: of the unit, and what tells this one from the unit's others.
        trainable: whether they have gradients.
    """

    name: str
    trainable: bool

    def __str__(self) -> str:
        of, count = self.bucket, len(self.parameters)
        dtype = str(of.dtype).removeprefix("torch.")
        return (
            f"{self.name}: {of.numel:,} {dtype} elements "
            f"of {count} {'' if self.trainable else 'frozen '}parameter"
            f"{'s' * (count > 1)}, {self.world_size} x {self.shard_numel:,} with "
            f"{self.padding} of padding"
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

    def encloses(self, other: Self) -> bool:
        """Tell whether the module of `other` is this one's, or inside of it."""
        return self.name == ROOT or f"{other.name}.".startswith(f"{self.name}.")

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, gathered in their own types, padding included."""
        return sum(flat.nbytes for flat in self.flats)

    def __str__(self) -> str:
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
        units: names of modules; None are the modules in `nn.ModuleList`s, which is
            where a transformer has its blocks (in PyTorch, one calls `fully_shard` on
            each of them).

    Raises ValueError for a unit that is no module of `module`. Chapter 08.
    """
    chosen = _chosen(module, units)
    homes: dict[Tensor, set[str]] = {}  # parameter -> the units it is in
    at = {"": ROOT}
    for path, child in module.named_modules(remove_duplicate=False):
        at[path] = chosen.get(id(child), at[path.rpartition(".")[0]])
        for parameter in child.parameters(recurse=False):
            homes.setdefault(parameter, set()).add(at[path])
    # Parameters of one type lie side by side.
    members: dict[str, dict[tuple, list[tuple[str, int]]]]  # names, and elements
    members = {unit: {} for unit in (ROOT, *chosen.values())}
    for name, p in module.named_parameters():
        (home, *others) = homes[p]
        kinds = members[ROOT if others else home]
        kind = p.dtype, p.device, p.requires_grad
        kinds.setdefault(kind, []).append((name, p.numel()))
    plan: list[UnitPlan] = []
    for unit, kinds in members.items():
        if kinds or unit == ROOT:
            more = len(kinds) > 1
            flats = (_flat(unit, *kind, world_size, more) for kind in kinds.items())
            plan.append(UnitPlan(len(plan), unit, tuple(flats)))
    return tuple(plan)


def _flat(
    unit: str, kind: tuple, sizes: list[tuple[str, int]], world_size: int, more: bool
) -> FlatPlan:
    """Lay parameters of a kind side by side; the unit may have `more` kinds."""
    dtype, device, trainable = kind
    names, numels = zip(*sizes, strict=True)
    *offsets, numel = accumulate(numels, initial=0)
    bucket = Bucket(0, names, tuple(offsets), numel, dtype, device)
    told = f".{str(dtype).removeprefix('torch.')}" + ".frozen" * (not trainable)
    return FlatPlan(bucket, world_size, unit + told * more, trainable)


def _chosen(module: nn.Module, units: Chosen) -> dict[int, str]:
    """Return the id of each unit's module, and its name, in the order of the model."""
    named = {name: child for name, child in module.named_modules() if name}
    if units is None:  # a list in a list is no unit: it is never called
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
        members = {c for m in lists for c in m if not isinstance(c, nn.ModuleList)}
        units = [name for name, child in named.items() if child in members]
    units = list(units)
    for name in units:
        if name not in named:
            raise ValueError(
                f"units has {name!r}, which is no module of this model; its modules "
                f"are {', '.join(list(named)[:8])}{', ...' * (len(named) > 8)}"
            )
    return {id(child): name for name, child in named.items() if name in units}
