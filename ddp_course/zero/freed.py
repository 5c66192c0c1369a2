"""What stands in a module for a parameter that is not whole at present.

A tensor whose storage is 0 bytes long looks like any other, and a piece of a parameter
like a small one: who computes with them gets nonsense, or the process ends. So while a
unit is freed, its modules have `Freed` in place of their parameters, and whoever uses
one gets an error that names the parameter. Chapter 08.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class ShardedError(RuntimeError):
    """Something that cannot be done while each rank has only its pieces."""


@dataclass(frozen=True, repr=False)
class Freed:
    """Stands for a parameter that is not whole at present; knows its form."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __getattr__(self, attribute: str) -> Any:
        # copy and pickle probe for special methods; PyTorch asks for this one where a
        # parameter is assigned, as it is when weights are tied
        if attribute.startswith("__") and attribute != "__qualname__":
            raise AttributeError(attribute)
        raise ShardedError(
            f"{self.name} has no numbers at present (.{attribute}): each rank has its "
            "piece of them, and they are whole while their unit computes. Elsewhere, "
            "call full_state_dict()"
        )

    def __repr__(self) -> str:
        """Say what it is; PyTorch's errors, as of functional_call, show this text."""
        return (
            f"{self.name}, of which each rank has its piece now (sharded modules take "
            "no parameters from outside)"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse any function of PyTorch that is called with a Freed."""
        leaves = tree_leaves((args, kwargs))
        freed = next(leaf for leaf in leaves if isinstance(leaf, cls))
        return freed.__getattr__(getattr(function, "__name__", "numbers"))


def is_sharded(module: nn.Module) -> bool:
    """Tell whether parameters of `module` are in shards already."""
    owners = module.modules()
    return any(isinstance(p, Freed) for m in owners for p in m._parameters.values())
