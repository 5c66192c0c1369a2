"""Buckets cut into shards: which rank owns which elements.

`naive` assigns whole parameters, so the ranks' shares can be very unequal: half of a
model may be one embedding. Here the parameters of a bucket lie side by side
in a row, and the row is cut into N equal shards; a cut may go through a parameter. A
reduce-scatter gives every rank its shard of the gradients, and an all-gather joins the
shards again:

       parameters    | a a a a a b b b | b c c c c . . . |   padding (.) makes all
       shard of rank |       0         |        1        |   shards equally long

Rank 1 owns a *piece* of b, the last element. Rajbhandari et al. 2020, "ZeRO", sections
5.1 and 5.2. Chapter 07.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_course.mechanisms.buckets import BUCKET_CAP_MB, Bucket, bucket_plan


@dataclass(frozen=True)
class RowPiece:
    """The elements [first, last) of a parameter, in the order of its memory.

    In its owner's shard, the piece begins at element `offset`.
    """

    parameter: str
    first: int
    last: int
    offset: int

    def part_of(self, shard: Tensor) -> Tensor:
        """Return the piece's elements in its owner's shard: a view."""
        return shard[self.offset :][: self.last - self.first]


@dataclass(frozen=True)
class ShardedBucket:
    """A bucket that is cut into one shard for each of `world_size` ranks.

    Rank r owns the elements [r * shard_numel, (r + 1) * shard_numel). Padding follows
    the last parameter, at most world_size - 1 elements.
    """

    bucket: Bucket
    world_size: int

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the row."""
        return self.bucket.parameters

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each parameter in the row, in elements."""
        return self.bucket.offsets

    @property
    def shard_numel(self) -> int:
        """Elements that each rank owns, padding included."""
        return -(-self.bucket.numel // self.world_size)

    @property
    def numel(self) -> int:
        """Elements of all shards together."""
        return self.world_size * self.shard_numel

    @property
    def nbytes(self) -> int:
        """Bytes of all shards together: the S of reduce-scatter and all-gather."""
        return self.numel * self.bucket.dtype.itemsize

    @property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.numel - self.bucket.numel

    def pieces(self, rank: int, empty: bool = False) -> tuple[RowPiece, ...]:
        """Return the pieces that `rank` owns, in the order of its shard.

        With `empty`, parameters of which `rank` owns nothing have an empty piece.
        """
        begin, end = rank * self.shard_numel, (rank + 1) * self.shard_numel
        edges, pieces = [*self.offsets, self.bucket.numel], []
        for name, start, stop in zip(self.parameters, edges, edges[1:], strict=False):
            first, last = (min(max(begin, edge), end) for edge in (start, stop))
            inside = (first - start, last - start) if first < last else (0, 0)
            pieces.append(RowPiece(name, *inside, first - begin))
        return tuple(piece for piece in pieces if empty or piece.first < piece.last)

    def zeros(self) -> Tensor:
        """Allocate a row for all shards, padding included."""
        kind = {"dtype": self.bucket.dtype, "device": self.bucket.device}
        return torch.zeros(self.numel, **kind)

    def __str__(self) -> str:
        lines = [f"{self.bucket}; {self.padding} elements of padding"]
        for rank in range(self.world_size):
            pieces = self.pieces(rank)
            names = [f"{p.parameter}[{p.first}:{p.last}]" for p in pieces]
            names = names if len(names) < 4 else [names[0], "...", names[-1]]
            lines.append(f"  rank {rank}: {' '.join(names) or 'nothing'}")
        return "\n".join(lines)


def shard_plan(
    named_parameters: Iterable[tuple[str, Tensor]],
    world_size: int,
    bucket_cap_mb: float = BUCKET_CAP_MB,
) -> tuple[ShardedBucket, ...]:
    """Divide the parameters into buckets (`mechanisms.buckets`), and each into shards.

    Pure: reads shapes, types and devices only. Frozen parameters and parameters without
    elements are in no bucket. Raises ValueError if the cap is not above 0. Chapter 07.
    """
    plan = bucket_plan(named_parameters, bucket_cap_mb, bucket_cap_mb)
    sizes = (b.group.size() if b.group else world_size for b in plan)
    return tuple(map(ShardedBucket, plan, sizes))


def shard_of(row: Tensor, rank: int, bucket: ShardedBucket) -> Tensor:
    """Return the shard of `rank` in a bucket's row: a view."""
    return row[rank * bucket.shard_numel :][: bucket.shard_numel]


def names_of(groups: Iterable[dict[str, Any]]) -> dict[Tensor, str]:
    """Return a name for each parameter: its own if it was passed, otherwise a number.

    `Optimizer(model.named_parameters(), ...)` passes names; otherwise the names are
    "0", "1", ..., the numbers of the parameters in `state_dict`. A name that was used
    before gets a number, too, so that all names differ.
    """
    names: dict[Tensor, str] = {}
    used = set()
    for group in groups:
        param_names = group.get("param_names") or [""] * len(group["params"])
        for parameter, name in zip(group["params"], param_names, strict=True):
            while not name or name in used:
                name = f"{name}{len(names)}"
            used.add(names.setdefault(parameter, name))
    return names


def copy_options(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Copy learning rates and other options from one optimizer's groups to another's.

    Schedulers change the options of the outer optimizer, and some inner optimizers
    change their own.
    """
    for source_group, target_group in zip(source, target, strict=True):
        for name, value in source_group.items():
            if name not in ("params", "param_names"):
                target_group[name] = value
