"""The whole state of a module of which each rank has a part: in one process's form.

With the names and shapes of the plain module, so that a run can go on in one process,
with another strategy, or on another number of ranks. How the parts come together is
the strategy's affair; what they are called for is the same everywhere. Chapter 08.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Gathering(Protocol):
    """What a strategy has for it: a module of Python's with these functions."""

    def gathered(self, module: Any, rank0_only: bool) -> dict[str, Tensor]:
        """Put the parts together."""

    def load(self, module: Any, state_dict: Mapping[str, Tensor]) -> None:
        """Keep the own part."""

    def gathered_optimizer(
        self, module: Any, optimizer: torch.optim.Optimizer, rank0_only: bool
    ) -> dict[str, Any]:
        """Put the optimizer's parts together."""

    def load_optimizer(
        self,
        module: Any,
        optimizer: torch.optim.Optimizer,
        state_dict: Mapping[str, Any],
    ) -> None:
        """Keep the own part of them."""


class HasWholeState:
    """A module whose whole state can be had; `GATHERING` says how."""

    GATHERING: Gathering

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """Return what the plain module's `state_dict` would be, on the CPU.

        Called by all ranks, of which with `rank0_only` the others get an empty dict.
        """
        return self.GATHERING.gathered(self, rank0_only)

    def load_full_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Take the numbers of a plain module's `state_dict`; called by all ranks.

        Each is given the whole of it and keeps its own part. Raises ReplicaError, on
        every rank, if names or shapes do not fit.
        """
        self.GATHERING.load(self, state_dict)

    def full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, rank0_only: bool = False
    ) -> dict[str, Any]:
        """Return the state that `optimizer` would have in one process, on the CPU.

        `optimizer` steps this module's `parameters()`; in one process it would have the
        plain module's, in the same order. Called by all ranks, as `full_state_dict`.
        Raises ReplicaError, on every rank, for states that cannot be put together.
        """
        return self.GATHERING.gathered_optimizer(self, optimizer, rank0_only)

    def load_full_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Let `optimizer` go on from the state of one process; called by all ranks.

        Each is given the whole of it and keeps its own part. Raises ReplicaError, on
        every rank, if it does not fit.
        """
        self.GATHERING.load_optimizer(self, optimizer, state_dict)


def unlike(state: Any, shapes: Mapping[str, torch.Size]) -> str | None:
    """Return what is wrong with a state dict, or None; raises nothing."""
    if not isinstance(state, Mapping):
        return f"state_dict is a {type(state).__name__}; it must be a dict"
    if missing := [key for key in shapes if key not in state]:
        return f"the state_dict has no {', '.join(missing[:3])}"
    if more := [key for key in state if key not in shapes]:
        return f"the state_dict has {', '.join(map(str, more[:3]))}: no such name here"
    for key, shape in shapes.items():
        found = getattr(state[key], "shape", type(state[key]).__name__)
        if found != shape:
            told = list(found) if isinstance(found, torch.Size) else found
            return f"the state_dict has {key} as {told}; it must be {list(shape)}"
    return None
