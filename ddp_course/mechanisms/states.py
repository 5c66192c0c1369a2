"""States that a checkpoint can save: full states, and states that differ per rank.

A checkpoint saves every object with `state_dict` and `load_state_dict`, such as a
module or an optimizer. `parallelize.whole` returns such objects for a divided training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor


class HasState(Protocol):
    """The methods that modules and optimizers share; all ranks call them together."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save; it is complete on rank 0 at least."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        """Load this state."""


@dataclass(frozen=True)
class Whole:
    """The state of a divided object, in the form that one process would have.

    All ranks call both functions together; the state is complete on rank 0 at least.
    """

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], object]


class PerRankStates:
    """The states of all ranks as one state, for objects that differ between ranks.

    `own` is this rank's object: a compressor with its error memory, or the model of a
    rank that steps alone. When fewer ranks load the states, those of the last ranks are
    lost; when more ranks load them, some ranks load the same state.
    """

    def __init__(self, own: HasState) -> None:
        self.own = own

    def state_dict(self) -> dict[str, Any]:
        """Return {rank: its state} on rank 0, and an empty dict on the others."""
        own = on_cpu(self.own.state_dict())
        if not dist.is_initialized():
            return {0: own}
        states = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, states)
        return dict(enumerate(states or ()))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's state."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.own.load_state_dict(state_dict[rank % len(state_dict)])


def on_cpu(state: Any) -> Any:
    """Return a state with all its tensors, also nested ones, on the CPU."""
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [on_cpu(value) for value in state]
    return state
