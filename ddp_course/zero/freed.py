"""What stands in a module for a parameter that is not whole at present.

A tensor whose storage is 0 bytes long looks like any other, and reading it ends the
process: there is nothing below the address. So while a unit is freed, its modules have
`Freed` in place of their parameters, and who uses one is told what is wrong.
Chapter 08.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class ShardedError(RuntimeError):
    """A parameter was used while each rank has only its shard of it."""


@dataclass(frozen=True)
class Freed:
    """Stands for a parameter that is not whole at present; knows its shape."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __getattr__(self, what: str) -> Any:
        if what.startswith("__"):  # copy, pickle and others ask what there is
            raise AttributeError(what)
        raise ShardedError(
            f"{self.name} has no numbers at present (.{what}): each rank has its shard "
            "of them, and they are whole while their unit computes. Elsewhere, call "
            "full_state_dict()"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Any function of PyTorch that is given one comes here."""
        told = tree_leaves((args, kwargs))
        freed = next(arg for arg in told if isinstance(arg, cls))
        return freed.__getattr__(getattr(function, "__name__", "numbers"))


@dataclass(frozen=True)
class Place:
    """Where a module keeps a parameter: `module._parameters[name]`."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    freed: Freed


def is_sharded(module: nn.Module) -> bool:
    """Tell whether parameters of `module` are in shards already."""
    owners = module.modules()
    return any(isinstance(p, Freed) for m in owners for p in m._parameters.values())


def places_in(module: nn.Module) -> dict[Tensor, list[Place]]:
    """Return for each parameter all places where it is: a tied one has several."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found: dict[Tensor, list[Place]] = {parameter: [] for parameter in names}
    for owner in module.modules():
        for name, p in owner._parameters.items():
            if p is not None:
                freed = Freed(names[p], p.shape, p.dtype, p.device, p.requires_grad)
                found[p].append(Place(owner, name, p, freed))
    return found
