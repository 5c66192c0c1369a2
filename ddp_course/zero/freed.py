"""What stands in a module for a parameter that is not whole at present.

A tensor whose storage is 0 bytes long looks like any other, and a piece of a parameter
like a small one: who computes with them gets nonsense, or the process ends. So while a
unit is in shards, its modules have `Freed` in place of their parameters, and who uses
one is told what is wrong. Chapter 08.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddp_course.mechanisms.frozen import came_later

if TYPE_CHECKING:
    from ddp_course.zero.unit_storage import Unit


class ShardedError(RuntimeError):
    """Something that cannot be done while each rank has only its pieces."""


@dataclass(frozen=True)
class Freed:
    """Stands for a parameter that is not whole at present; knows its form."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __getattr__(self, what: str) -> Any:
        if what.startswith("__"):  # copy, pickle and others ask what there is
            raise AttributeError(what)
        raise ShardedError(
            f"{self.name} has no numbers at present (.{what}): each rank has its piece "
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


def is_sharded(module: nn.Module) -> bool:
    """Tell whether parameters of `module` are in shards already."""
    owners = module.modules()
    return any(isinstance(p, Freed) for m in owners for p in m._parameters.values())


class Divided:
    """What a module cannot do any more, or not without more words, when in shards."""

    def check_kept(self) -> None:
        """Raise RuntimeError for other parameters than its own, which are freed now."""
        self.frozen.check()
        for owner, module in self.module.named_modules():
            for name, parameter in module._parameters.items():
                if not (parameter is None or isinstance(parameter, Freed)):
                    raise RuntimeError(came_later(f"{owner}.{name}"))

    def check_unchanged(self, unit: Unit) -> None:
        """Raise ShardedError if forward has changed a parameter, which would be lost.

        What is kept are the pieces. (Each change in place is counted by autograd.)
        """
        for place, version in zip(unit.places, unit.versions, strict=True):
            _, parameter, freed = place
            if parameter._version != version:
                raise ShardedError(
                    f"{freed.name} was changed in place while its unit computed; the "
                    "change would be lost when it is freed. Change what parameters() "
                    "has, between steps"
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        raise ShardedError(
            f"{type(self).__name__} cannot be moved or cast any more (to, cuda, half, "
            "...): do that with the module before it is sharded"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Raise ShardedError: which state is meant has to be said."""
        raise ShardedError(
            "state_dict() could be the whole state or this rank's part: call "
            "full_state_dict(), or zero.sharded_checkpoint.save(folder, ...)"
        )

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ShardedError: which state is meant has to be said."""
        load = "zero.sharded_checkpoint.load(folder, ...)"
        raise ShardedError(f"call load_full_state_dict(state), or {load}")
