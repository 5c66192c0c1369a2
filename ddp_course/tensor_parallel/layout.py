"""Which parameter is cut along which dimension: the layout of a model, as plain data.

    parameter                  whole       cut       each of 2 ranks
    embed.tokens.weight        (96, 144)   rows      (48, 144)
    embed.positions.weight     (64, 144)   -         (64, 144)
    blocks.0.attn.qkv.weight   (432, 144)  rows      (216, 144)
    blocks.0.attn.proj.weight  (144, 144)  columns   (144, 72)
    blocks.0.attn.proj.bias    (144,)      -         (144,)
    ...

The rows of `qkv` are ordered head by head, so a part of them are the queries, keys and
values of some heads, and the columns of `proj` that those heads' values meet are the
same part of them. Attention itself needs no change. Chapter 09.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ddp_course.model import GPTConfig
from ddp_course.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParallelLayer,
    RowParallelLinear,
    VocabParallelEmbedding,
    part_of,
)

# The modules of the GPT that are cut, and how; as parallelize_module's plan in PyTorch.
PLAN: MappingProxyType[str, type[ParallelLayer]] = MappingProxyType(
    {
        "embed.tokens": VocabParallelEmbedding,
        "attn.qkv": ColumnParallelLinear,
        "attn.proj": RowParallelLinear,
        "mlp.up": ColumnParallelLinear,
        "mlp.down": RowParallelLinear,
        "head.out": ColumnParallelLinear,
    }
)


def layer_for(name: str) -> type[ParallelLayer] | None:
    """Return the parallel layer for the module of this name; None: it is not cut."""
    last_two = ".".join(name.split(".")[-2:])
    return PLAN.get(last_two)


@dataclass(frozen=True)
class Cut:
    """How one parameter lies on the ranks of a group.

    Attributes:
        name: in the plain model.
        shape: of the whole parameter.
        dim: the dimension along which it is cut; None if every rank has all of it.
        tp_size: how many ranks share it.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None
    tp_size: int

    @property
    def own_shape(self) -> tuple[int, ...]:
        """What each rank has of it."""
        return tuple(
            length // self.tp_size if dim == self.dim else length
            for dim, length in enumerate(self.shape)
        )

    @property
    def own_numel(self) -> int:
        """Elements that each rank has."""
        return prod(self.own_shape)

    def part(self, whole: Tensor, tp_rank: int) -> Tensor:
        """Return a rank's part of the whole parameter, or of its like: a view."""
        return part_of(whole, self.dim, tp_rank, self.tp_size)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the parts of all ranks together, in rank order."""
        return parts[0] if self.dim is None else torch.cat([*parts], self.dim)

    def __str__(self) -> str:
        """One line for a reader."""
        how = {None: "-", 0: "rows", 1: "columns"}[self.dim]
        return f"{self.name:<26} {self.shape!s:<12} {how:<8} {self.own_shape}"


def layout(model: nn.Module, tp_size: int) -> tuple[Cut, ...]:
    """Return how every parameter of the plain `model` lies on `tp_size` ranks.

    Pure: reads names and shapes only. A tied parameter is there once, by its first
    name. Raises ValueError if a size cannot be divided. Chapter 09.
    """
    problem = indivisible(model.config, tp_size)
    if problem:
        raise ValueError(problem)
    cuts = []
    for name, parameter in model.named_parameters():
        module, _, last = name.rpartition(".")
        layer = layer_for(module)
        dim = None if layer is None else layer.CUTS[last]
        cuts.append(Cut(name, tuple(parameter.shape), dim, tp_size))
    return tuple(cuts)


def indivisible(config: GPTConfig, tp_size: int) -> str | None:
    """Return why so many ranks cannot share a GPT of these sizes, or None."""
    sizes = {
        "n_head": config.n_head,
        "vocab_size": config.vocab_size,
        "4 * d_model": 4 * config.d_model,
    }
    fits = [
        n
        for n in range(1, config.n_head + 1)
        if not any(size % n for size in sizes.values())
    ]
    for name, size in sizes.items():
        if size % tp_size:
            return (
                f"{name} is {size}, which {tp_size} ranks cannot share equally; this "
                f"model can be cut for {', '.join(map(str, fits))} ranks"
            )
    return None
