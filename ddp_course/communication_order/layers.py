"""The layers of a module: who uses which parameter, and which layers travel together.

Chapter 15.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor, nn


class Layers:
    """All modules of a model that have parameters of their own, by name.

    Args:
        module: the model.
        whole: modules that are one layer with all that is in them.
        piece: bytes; small neighbours travel together as long as they are no more.

    Attributes:
        uses: name -> the parameters that this layer waits for.
        users: parameter -> the names of all layers that use it.
        own: name -> its parameters by their full names; a tied one has one owner.
        groups: names of layers that travel together, those that backward reaches first
            first.
    """

    def __init__(
        self, module: nn.Module, whole: Sequence[nn.Module] = (), piece: float = 0
    ) -> None:
        self.modules = dict(module.named_modules())
        self.uses = {
            name: list(layer.parameters(recurse=layer in whole))
            for name, layer in self.modules.items()
        }
        self.users: dict[Tensor, set[str]] = {}
        owner: dict[Tensor, str] = {}
        for name, parameters in self.uses.items():
            for parameter in parameters:
                owner.setdefault(parameter, name)
                self.users.setdefault(parameter, set()).add(name)
        full = {p: name for name, p in module.named_parameters()}
        self.own = {
            name: {full[p]: p for p in parameters if owner[p] == name}
            for name, parameters in self.uses.items()
        }
        self.groups = groups_of(self.own, piece)


def groups_of(own: Mapping[str, Mapping[str, Tensor]], piece: float) -> list[list[str]]:
    """Return the layers in reverse order; small neighbours fill up a piece."""
    groups, filled = [], math.inf
    for name in reversed([name for name in own if own[name]]):
        nbytes = sum(p.nbytes for p in own[name].values())
        filled += nbytes
        if filled > piece:
            groups, filled = [*groups, []], nbytes
        groups[-1].insert(0, name)
    return groups
