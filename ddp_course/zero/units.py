"""The units of stage 3, as plain data: which parameters are gathered together.

A layer's whole parameters are needed only while it computes. So the model is divided
into *units*: each unit is gathered just before its forward and freed after it, and once
more in backward. The blocks of a transformer are units; the remaining parameters,
embedding and head, are the *root* unit, which is gathered from the beginning of a
forward or backward to its end.

    unit blocks.0        | norm1.weight | norm1.bias | attn.qkv.weight | ... | . .|
    shard of rank        |        0          |         1         |        2       |

A unit's parameters lie side by side in one flat tensor, and each rank owns 1/N of its
elements; a cut may go through a parameter (`shards`). If a unit has parameters of
several types, or frozen ones, each kind has a flat tensor of its own: the unit's
*flats*. `unit_storage` allocates and frees their memory.

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
        name: the unit's name, with the type if the unit has several flats.
        trainable: whether the parameters have gradients.
    """

    name: str
    trainable: bool

    def __str__(self) -> str:
        bucket, count = self.bucket, len(self.parameters)
        dtype = str(bucket.dtype).removeprefix("torch.")
        return (
            f"{self.name}: {bucket.numel:,} {dtype} elements "
            f"of {count} {'' if self.trainable else 'frozen '}parameter"
            f"{'s' * (count > 1)}, {self.world_size} x {self.shard_numel:,} with "
            f"{self.padding} of padding"
        )


@dataclass(frozen=True)
class UnitPlan:
    """Parameters that are gathered and freed together: those of one module.

    Attributes:
        index: the unit's place in the plan; the root unit is number 0.
        name: the module's name, or "root".
        flats: one for each kind of parameters (type, device, trainable or frozen), most
            often only one; the root unit may have none.
    """

    index: int
    name: str
    flats: tuple[FlatPlan, ...]

    def encloses(self, other: Self) -> bool:
        """Return whether `other` is this unit, or a unit inside of its module."""
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
    """Divide the parameters of `module` into units, the root first, and into shards.

    Pure: reads names, shapes and types only. A parameter belongs to the innermost
    chosen module that contains it. A parameter in several chosen modules, such as a
    tied weight, or in none, belongs to the root.

    Args:
        module: the whole model.
        world_size: the number of ranks.
        units: names of modules; None means the modules in `nn.ModuleList`s, where a
            transformer has its blocks (in PyTorch, one calls `fully_shard` on each
            block).

    Raises ValueError for a name that is no module of `module`. Chapter 08.
    """
    chosen = _chosen(module, units)
    homes: dict[Tensor, set[str]] = {}  # parameter -> units that contain it
    at = {"": ROOT}
    for path, child in module.named_modules(remove_duplicate=False):
        at[path] = chosen.get(id(child), at[path.rpartition(".")[0]])
        for parameter in child.parameters(recurse=False):
            homes.setdefault(parameter, set()).add(at[path])
    # unit -> kind -> [(name, number of elements)]: parameters of one kind share a flat
    members: dict[str, dict[tuple, list[tuple[str, int]]]]
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
    """Return a flat of parameters of one kind; `more`: its unit has other kinds."""
    dtype, device, trainable = kind
    names, numels = zip(*sizes, strict=True)
    *offsets, numel = accumulate(numels, initial=0)
    bucket = Bucket(0, names, tuple(offsets), numel, dtype, device)
    suffix = f".{str(dtype).removeprefix('torch.')}" + ".frozen" * (not trainable)
    return FlatPlan(bucket, world_size, unit + suffix * more, trainable)


def _chosen(module: nn.Module, units: Chosen) -> dict[int, str]:
    """Return {id of a unit's module: its name}, in the order of the model."""
    children = {name: child for name, child in module.named_modules() if name}
    if units is None:  # a list in a list is no unit: it is never called
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
        members = {c for m in lists for c in m if not isinstance(c, nn.ModuleList)}
        units = [name for name, child in children.items() if child in members]
    units = list(units)
    for name in units:
        if name not in children:
            raise ValueError(
                f"{name!r:.50} is no module of this model; its modules are "
                f"{', '.join(list(children)[:8])}{' and others' * (len(children) > 8)}"
            )
    return {id(child): name for name, child in children.items() if name in units}
