"""What FullyShardedDataParallel adds to the readable stage 3, as parts.

    Recorded      time-line: what is computed, launched and waited for
    Kept          refuse parameters that were replaced or changed, and second gradients
    Unused        leave pieces alone that no rank had a gradient for
    SameOrder     do all ranks use the units in one order?
    Patient       gloo's threads interrupt nobody meanwhile
    Cast          floating inputs in another type

Each part hears some of the moments of `stage3_simple`, and knows no other part.
Chapter 08.
"""

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ddp_course.collectives.communicator import Communicator
from ddp_course.collectives.patience import patient, threads_of
from ddp_course.mechanisms.frozen import Frozen, came_later, check_first_order
from ddp_course.mechanisms.guards import leave_behind
from ddp_course.mechanisms.hooks import tensors_in
from ddp_course.mechanisms.recovery import on_any_rank
from ddp_course.mechanisms.timeline import Timeline
from ddp_course.zero.freed import Freed, ShardedError
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel as Sharded
from ddp_course.zero.unit_storage import Unit


class Recorded:
    """Begin a time-line for each pass; record for how long each unit computes."""

    def __init__(self) -> None:
        self.since: dict[Unit, float] = {}  # when the unit began to compute

    def before_forward(self, fsdp: Sharded) -> None:
        """Begin a time-line, if anybody keeps a log."""
        fsdp.timeline = Timeline.begin()

    before_backward = before_forward

    def gathered(self, fsdp: Sharded, unit: Unit) -> None:
        """Note when the unit begins to compute."""
        self.since[unit] = time.perf_counter()

    def used(self, fsdp: Sharded, unit: Unit, output: Any) -> None:
        """Record how long its forward took."""
        self._computed(fsdp, "forward", unit)

    def left(self, fsdp: Sharded, unit: Unit) -> None:
        """Record how long its backward took."""
        self._computed(fsdp, "backward", unit)

    def _computed(self, fsdp: Sharded, op: str, unit: Unit) -> None:
        since = self.since.pop(unit, None)
        if since and unit is not fsdp.root:
            fsdp.timeline.add(op, since, "compute", unit=unit.plan.name)


class Kept:
    """Refuse what would be lost: other parameters, changed ones, second gradients."""

    def __init__(self) -> None:
        self.versions: dict[Unit, list[int]] = {}

    def constructed(self, fsdp: Sharded) -> None:
        """Note what the module is made of; its old parameters are left behind."""
        self.frozen = Frozen(fsdp, pieces=True)
        self.places = {name: p.data_ptr() for name, p in fsdp.pieces.items()}
        flats = (flat for unit in fsdp.units for flat in unit.flats)
        wholes = (parameter for flat in flats for parameter in flat.parameters)
        leave_behind(wholes, f"{type(fsdp).__name__}(module)")

    def before_forward(self, fsdp: Sharded) -> None:
        """Raise RuntimeError for parameters that were put into the module since."""
        self.frozen.check()
        for name, piece in fsdp.pieces.items():
            if piece.data_ptr() != self.places[name]:
                raise RuntimeError(
                    f"{name}.data was replaced, and the shard that is gathered has the "
                    "old numbers: change numbers in place (copy_, mul_)"
                )
        for owner, module in fsdp.module.named_modules():
            for name, parameter in module._parameters.items():
                if not (parameter is None or isinstance(parameter, Freed)):
                    raise RuntimeError(came_later(f"{owner}.{name}"))

    def gathered(self, fsdp: Sharded, unit: Unit) -> None:
        """Note how often autograd has seen each parameter change in place."""
        self.versions[unit] = [parameter._version for _, parameter, _ in unit.places]

    def used(self, fsdp: Sharded, unit: Unit, output: Any) -> None:
        """Raise ShardedError if forward has changed a parameter, or returns one."""
        self._check_output(unit, list(tensors_in(output)))
        for place, version in zip(unit.places, self.versions[unit], strict=True):
            _, parameter, freed = place
            if parameter._version != version:
                raise ShardedError(
                    f"{freed.name} was changed in place while its unit computed; the "
                    "change would be lost when it is freed. Change what parameters() "
                    "has, between steps"
                )

    def _check_output(self, unit: Unit, tensors: list[Tensor]) -> None:
        """Raise ShardedError for an output that is freed, or that nobody can find."""
        wholes = {flat.whole.untyped_storage()._cdata for flat in unit.flats}
        if any(t.untyped_storage()._cdata in wholes for t in tensors):
            raise ShardedError(
                f"the forward of {unit.plan.name} returned one of its parameters, or a "
                "view of one, whose memory is freed now: return a copy (clone())"
            )
        if not (torch.is_grad_enabled() and unit.trainable):
            return
        what = "no tensor is found" if not tensors else "no tensor requires a gradient"
        if not any(t.requires_grad for t in tensors):
            raise ShardedError(
                f"{what} in what the forward of {unit.plan.name} returned, so backward "
                "could not be seen to come back: return tensors, or lists, dicts or "
                "dataclasses of them; what is not trained goes in torch.no_grad()"
            )

    def before_backward(self, fsdp: Sharded) -> None:
        """Raise RuntimeError in a backward pass that is itself recorded."""
        check_first_order()


class Unused:
    """Let pieces be without a gradient that no rank had one for.

    Zeros would do in a sum, but weight decay and momentum would move them.
    """

    def __init__(self, comms: list[Communicator]) -> None:
        self.comms = comms

    def after_backward(self, fsdp: Sharded) -> None:
        """Compare along all groups; all ranks call it."""
        flats = [flat for unit in fsdp.units for flat in unit.trainable]
        found = [name not in flat.missed for flat in flats for name in flat.pieces]
        for comm in self.comms:
            found = on_any_rank(found, comm.group)
        pieces = (piece for flat in flats for piece in flat.pieces.values())
        for piece, by_any in zip(pieces, found, strict=True):
            if not by_any:
                piece.grad = None
        for flat in flats:
            flat.missed.clear()


class SameOrder:
    """Compare the order of the units with the other ranks' when it is a new one.

    A shard does not say of which unit it is: if one rank gathered block 1 while another
    gathers block 2, each would get a mixture, and nobody would notice.
    """

    def __init__(self, comms: list[Communicator]) -> None:
        self.comms = comms
        self.units: list[int] = []  # used in this pass, in order
        self.agreed: dict[str, list[int]] = {}

    def before_forward(self, fsdp: Sharded) -> None:
        """Begin a new order."""
        self.units = []

    before_backward = before_forward

    def gathered(self, fsdp: Sharded, unit: Unit) -> None:
        """Note a unit that forward uses."""
        if not fsdp.open and unit is not fsdp.root:
            self.units.append(unit.plan.index)

    def after_forward(self, fsdp: Sharded) -> None:
        """Raise CollectiveError if other ranks have used other units."""
        self._compare("forward")

    def reducing(self, fsdp: Sharded, unit: Unit) -> None:
        """Note a unit whose gradients are sent."""
        self.units.append(unit.plan.index)

    def after_backward(self, fsdp: Sharded) -> None:
        """Raise CollectiveError if other ranks have sent other gradients."""
        self._compare("backward")

    def _compare(self, what: str) -> None:
        if self.agreed.get(what) != self.units:
            for comm in self.comms:
                comm.agree_now(f"{what} through the units {self.units}")
            self.agreed[what] = list(self.units)


class Patient:
    """Let gloo's threads interrupt nobody until the forward or backward has ended.

    What they carry is seldom needed at once, and where there are no more cores than
    ranks, they take the time from those that compute (`collectives.patience`).
    """

    def __init__(self, comms: list[Communicator]) -> None:
        self.comms, self.stack = comms, ExitStack()

    def before_forward(self, fsdp: Sharded) -> None:
        """Change how Linux schedules gloo's threads."""
        threads = [thread for comm in self.comms for thread in threads_of(comm)]
        self.stack.enter_context(patient(threads))

    before_backward = before_forward

    def after_forward(self, fsdp: Sharded) -> None:
        """Change it back."""
        self.stack.close()

    after_backward = tidied = after_forward


class Cast:
    """Cast floating inputs of the module and of its units to one type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def constructed(self, fsdp: Sharded) -> None:
        """Register a hook on the module of each unit."""
        modules = dict(fsdp.module.named_modules())
        for unit in fsdp.units:
            module = fsdp.module if unit is fsdp.root else modules[unit.plan.name]
            module.register_forward_pre_hook(self._cast, prepend=True, with_kwargs=True)

    def _cast(self, module: nn.Module, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
        cast = lambda t: t.to(self.dtype) if t.is_floating_point() else t  # noqa: E731
        return tree_map_only(Tensor, cast, inputs), tree_map_only(Tensor, cast, kwargs)
