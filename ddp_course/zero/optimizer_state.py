"""Parts of a sharded optimizer: where its pieces come from, and its whole state.

    Places             notes which elements of which parameter a piece is
    ConsolidatedState  brings the states of all pieces together, and divides them again

The state has the form of one process, so that one process, or any number of ranks, can
go on from it. Chapter 07.
"""

from typing import Any

from torch import Tensor

from ddp_course.mechanisms.assembly import (
    full_optimizer_state,
    load_full_optimizer_state,
)
from ddp_course.mechanisms.placements import Flat, place, placed
from ddp_course.zero.options import copy_options
from ddp_course.zero.shards import ShardedBucket, names_of


class Places:
    """Places every piece, so that norms and states of the whole model can be taken."""

    def row_made(
        self, optimizer: Any, bucket: ShardedBucket, parameters: dict[str, Tensor]
    ) -> None:
        """Place this rank's pieces of a row."""
        for piece in bucket.pieces(optimizer.rank):
            parameter, where = (
                parameters[piece.parameter],
                Flat(piece.first, piece.last),
            )
            mine = optimizer.owned[parameter]
            of = {"like": parameter, "name": piece.parameter}
            place(mine, optimizer.process_group, where, **of)


class ConsolidatedState:
    """The whole state of a sharded optimizer, on one rank, until the next step."""

    def __init__(self) -> None:
        self.whole: dict[str, Any] | None = None

    def gradients_complete(self, optimizer: Any) -> None:
        """Forget the state: it is about to change."""
        self.whole = None

    def consolidate(self, optimizer: Any, to: int) -> None:
        """Send all states to the group's rank `to`."""
        if to not in range(optimizer.world_size):
            last = optimizer.world_size - 1
            raise ValueError(f"to is {to}; it can be 0 to {last}")
        where = plain_names(optimizer), [optimizer.process_group]
        whole = full_optimizer_state(optimizer.optim, *where, everywhere=to > 0)
        self.whole = whole if optimizer.rank == to else None

    def state_dict(self, optimizer: Any) -> dict[str, Any]:
        """Return the consolidated state. Raises RuntimeError if there is none."""
        if self.whole is None:
            raise RuntimeError(
                f"each rank has its own part of the state: call "
                f"consolidate_state_dict(to={optimizer.rank}) on all ranks before "
                f"state_dict() on rank {optimizer.rank}"
            )
        copy_options(optimizer.param_groups, self.whole["param_groups"])
        return self.whole

    def load(self, optimizer: Any, state_dict: dict[str, Any], *where: Any) -> None:
        """Give every piece its part of a whole state."""
        load_full_optimizer_state(optimizer.optim, state_dict, *where)
        optimizer.state, self.whole = optimizer.optim.state, None
        copy_options(optimizer.optim.param_groups, optimizer.param_groups)


def plain_names(optimizer: Any) -> list[list[str]]:
    """Return of each group the parameters' names in the plain model."""
    names = names_of(optimizer.param_groups)
    names |= {p: way.name for p in names if (way := placed(p))}
    return [[names[p] for p in group["params"]] for group in optimizer.param_groups]
