"""What all stage 3 modules are: a model of which each rank has only its pieces.

How it comes to that, and what others see of it. When units are gathered and freed is
what `stage3_naive`, `stage3_simple` and `stage3` differ in. Chapter 08.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import nn

from ddp_course.collectives import communicator
from ddp_course.mechanisms.agreement import on_any_rank
from ddp_course.mechanisms.broadcast import broadcast_all
from ddp_course.mechanisms.frozen import Frozen
from ddp_course.mechanisms.guards import leave_behind
from ddp_course.mechanisms.shard_exchange import ShardMessages
from ddp_course.mechanisms.whole_state import PlainModel, WholeState, groups_before
from ddp_course.zero.arguments import agreed_units
from ddp_course.zero.freed import Divided
from ddp_course.zero.unit_storage import FlatStorage, Place, Unit
from ddp_course.zero.units import Chosen


class ShardedModule(Divided, WholeState, nn.Module):
    """Holds `module` in shards: `parameters()` are this rank's pieces of its own.

    They have the plain names, and any elementwise optimizer can step them (SGD, AdamW,
    ...), in groups by name, too: to it they are vectors with their mean gradients. A
    parameter that some rank has no gradient for counts as one whose gradient is zero
    there; one that none has any for is left alone. Buffers stay each rank's own; the
    whole state has the first rank's.

    Args:
        module: what another parallelism has cut before is a module like any other.
        process_group, units, replicas: as of `stage3.FullyShardedDataParallel`.
        exchange, storage: how shards come together, and their memory.
        problem, told: why this cannot be, and what else all ranks must have equal.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        units: Chosen = None,
        replicas: dist.ProcessGroup | None = None,
        exchange: ShardMessages | None = None,
        storage: Callable[..., FlatStorage] = FlatStorage,
        problem: str | None = None,
        told: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        groups = [process_group] if replicas is None else [process_group, replicas]
        self.comms = [communicator(group) for group in groups]
        self.plan = agreed_units(module, self.comms, units, problem, told or {})
        self.process_group, self.comm = process_group, self.comms[0]
        self.exchange = exchange or ShardMessages(process_group)
        self.plain = PlainModel.of(module)
        self.groups = (*groups_before(module), self.comm.group)
        for comm in self.comms:
            broadcast_all(module.buffers(), comm.ranks[0], comm.group)
        parameters, places = dict(module.named_parameters()), places_in(module)
        self.units: list[Unit] = []
        pieces: dict[str, nn.Parameter] = {}
        how = self.exchange, replicas
        for unit in self.plan:  # one after the other: only one is there twice at a time
            flats = [storage(flat, parameters, *how) for flat in unit.flats]
            self.units.append(Unit(unit, flats, places))
            for flat in flats:
                pieces |= flat.pieces
        leave_behind(parameters.values(), f"{type(self).__name__}(module)")
        self.root, self.module = self.units[0], module
        self.pieces = {name: pieces[name] for name in parameters}  # in the plain order
        self.frozen = Frozen(self, pieces=True)

    def _forget_unused(self) -> None:
        """Let pieces be without a gradient that no rank had one for; all ranks call it.

        Zeros would do in a sum, but weight decay and momentum would move them.
        """
        flats = [flat for unit in self.units for flat in unit.trainable]
        there = [name not in flat.missed for flat in flats for name in flat.pieces]
        for comm in self.comms:
            there = on_any_rank(there, comm.group)
        pieces = (piece for flat in flats for piece in flat.pieces.values())
        for piece, by_any in zip(pieces, there, strict=True):
            if not by_any:
                piece.grad = None
        for flat in flats:
            flat.missed.clear()

    # ---- what torch.nn.Module would do, were it whole --------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's pieces, by the names of the plain module's parameters."""
        for name, piece in self.pieces.items():
            yield prefix + ("." if prefix else "") + name, piece

    def extra_repr(self) -> str:
        """Tell what is gathered together."""
        return "\n".join(map(str, self.plan))


def places_in(module: nn.Module) -> dict[str, list[Place]]:
    """Return all places of each parameter, by name: a tied one has several."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found: dict[str, list[Place]] = {name: [] for name in names.values()}
    for owner in module.modules():
        for name, parameter in owner.named_parameters("", False, False):
            found[names[parameter]].append((owner, name))
    return found
