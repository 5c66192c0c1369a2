"""Parts that turn the readable stage 3 into FullyShardedDataParallel.

    ParameterGuard  raise for replaced or changed parameters, and for double backward
    Stepped         raise for steps without gradients, and for empty parameter groups
    UnusedPieces    leave pieces unchanged for which no rank had a gradient
    SameOrder       raise unless all ranks use the units in the same order
    PatientPass     keep gloo's threads from interrupting forward and backward
    Cast            cast floating-point inputs
    Offload         wait for gradients that are being copied to the CPU

Each part has methods for some of the moments of `stage3_simple` and `stage3`, and knows
no other part. The file also has `Order`, which decides what to gather ahead, and
`OffloadedStorage`, for shards on the CPU. Chapter 08.
"""

import functools
import hashlib
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map_only

from ddp_course.collectives.patience import patient, socket_threads
from ddp_course.launch.deadlock import CollectiveError
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.frozen import Frozen, added_too_late, check_first_order
from ddp_course.mechanisms.graph import tensors_in
from ddp_course.mechanisms.placements import leave_behind
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel as Sharded
from ddp_course.zero.unit_storage import FlatStorage, Freed, ShardedError, Unit

Group = dist.ProcessGroup
Exchange = Callable[[str], list[str]]  # one rank's text -> the texts of all ranks


class ParameterGuard:
    """A part that refuses replaced parameters, changed ones, and double backward."""

    def __init__(self) -> None:
        self.versions: dict[Unit, list[int]] = {}

    def constructed(self, fsdp: Sharded) -> None:
        """Record the pieces; optimizers must not step the original parameters."""
        self.frozen = Frozen(fsdp, pieces=True)
        self.places = {name: p.data_ptr() for name, p in fsdp.pieces.items()}
        flats = (flat for unit in fsdp.units for flat in unit.flats)
        wholes = (parameter for flat in flats for parameter in flat.parameters)
        leave_behind(wholes, f"{type(fsdp).__name__}(module)")

    def before_forward(self, fsdp: Sharded) -> None:
        """Raise RuntimeError for parameters that were replaced or added since."""
        self.frozen.check()
        for name, piece in fsdp.pieces.items():
            if piece.data_ptr() != self.places[name]:
                raise RuntimeError(
                    f"{name}.data was replaced, but the shard that is gathered still "
                    "has the old values: change values in place (copy_, mul_)"
                )
        for owner, module in fsdp.module.named_modules():
            for name, parameter in module._parameters.items():
                if not (parameter is None or isinstance(parameter, Freed)):
                    raise RuntimeError(added_too_late(f"{owner}.{name}"))

    def gathered(self, fsdp: Sharded, unit: Unit) -> None:
        """Record autograd's version counter of each parameter."""
        self.versions[unit] = [parameter._version for _, parameter, _ in unit.places]

    def used(self, fsdp: Sharded, unit: Unit, output: Any) -> None:
        """Raise ShardedError if forward changed a parameter, or returned one."""
        self._check_output(unit, list(tensors_in(output)))
        for place, version in zip(unit.places, self.versions[unit], strict=True):
            _, parameter, freed = place
            if parameter._version != version:
                raise ShardedError(
                    f"{freed.name} was changed in place while its unit computed; the "
                    "change would be lost when the unit is freed. Change parameters() "
                    "between steps instead"
                )

    def _check_output(self, unit: Unit, tensors: list[Tensor]) -> None:
        """Raise ShardedError for an output that gets freed or that hooks cannot see."""
        wholes = {flat.whole.untyped_storage()._cdata for flat in unit.flats}
        if any(t.untyped_storage()._cdata in wholes for t in tensors):
            raise ShardedError(
                f"the forward of {unit.plan.name} returned one of its parameters, or a "
                "view of one; that memory is about to be freed: return a copy (clone())"
            )
        if not (torch.is_grad_enabled() and unit.trainable):
            return
        if not any(t.requires_grad for t in tensors):
            kind = "tensor that requires a gradient" if tensors else "tensor"
            raise ShardedError(
                f"the forward of {unit.plan.name} returned no {kind}, so no hook can "
                "notice when backward reaches this unit: return tensors, or lists, "
                "dicts or dataclasses of them; run untrained units in torch.no_grad()"
            )

    def before_backward(self, fsdp: Sharded) -> None:
        """Raise RuntimeError if this backward itself is recorded (create_graph)."""
        check_first_order()


class Stepped:
    """A part that refuses optimizer steps that would be silently wrong.

    These are steps of empty parameter groups, and steps without a backward pass.

    Attributes:
        waits: whether a forward was recorded, with no backward since then.
    """

    waits = False

    def constructed(self, fsdp: Any) -> None:
        """Mark the pieces, and watch the steps of all optimizers."""
        _watch()
        for piece in fsdp.pieces.values():
            piece.stepped = weakref.ref(self)

    def after_forward(self, fsdp: Any) -> None:
        """Record that a backward should follow."""
        self.waits = torch.is_grad_enabled()

    def before_backward(self, fsdp: Any) -> None:
        """Record that the backward has begun."""
        self.waits = False


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error for an optimizer that would step pieces wrongly."""
    groups = optimizer.param_groups
    pieces = [p for group in groups for p in group["params"] if hasattr(p, "stepped")]
    if not pieces:
        return
    part = pieces[0].stepped()
    if part and part.waits and all(piece.grad is None for piece in pieces):
        raise RuntimeError(
            "no parameter has a gradient, though a forward was recorded: no backward "
            "has reached the sharded module. backward(inputs=...) and autograd.grad "
            "do not reach parameters(), which are pieces: call loss.backward()"
        )
    if not all(group["params"] for group in groups):
        raise RuntimeError(
            "a parameter group of this optimizer is empty. Pieces of parameters are "
            "vectors: p.dim() is 1 for each, so choose groups by name, or by the shape "
            "that the plain module's parameters had"
        )


class UnusedPieces:
    """A part that leaves pieces without `grad` if no rank had a gradient for them.

    A `grad` of zeros would let weight decay and momentum change them.
    """

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = exchanges

    def after_backward(self, fsdp: Sharded) -> None:
        """Find out, along all groups, which pieces had a gradient on some rank."""
        flats = [flat for unit in fsdp.units for flat in unit.trainable]
        names = [(flat, name) for flat in flats for name in flat.pieces]
        flags = "".join("01"[name not in flat.missed] for flat, name in names)
        for exchange in self.exchanges:
            flags = "".join(map(max, zip(*exchange(flags), strict=True)))
        for (flat, name), flag in zip(names, flags, strict=True):
            if flag == "0":
                flat.pieces[name].grad = None
        for flat in flats:
            flat.missed.clear()


class SameOrder:
    """A part that compares the ranks' orders of the units after every pass.

    A message does not name its unit: if one rank gathered block 1 and another block 2,
    each would get a mixture of both, without any error.
    """

    def __init__(self, groups: Sequence[Group], exchanges: Sequence[Exchange]) -> None:
        self.groups, self.exchanges = groups, exchanges
        self.units: list[int] = []  # used in this pass, in order

    def before_forward(self, fsdp: Sharded) -> None:
        """Begin a new order."""
        self.units = []

    before_backward = before_forward

    def gathered(self, fsdp: Sharded, unit: Unit) -> None:
        """Record a unit that forward uses."""
        if not fsdp.open and unit is not fsdp.root:
            self.units.append(unit.plan.index)

    def after_forward(self, fsdp: Sharded) -> None:
        """Raise CollectiveError if other ranks used the units in another order."""
        self._compare("forward")

    def reducing(self, fsdp: Sharded, unit: Unit) -> None:
        """Record a unit whose gradients are sent."""
        self.units.append(unit.plan.index)

    def after_backward(self, fsdp: Sharded) -> None:
        """Raise CollectiveError if other ranks sent gradients in another order."""
        self._compare("backward")

    def _compare(self, direction: str) -> None:
        own = hashlib.sha256(repr(self.units).encode()).hexdigest()[:16]
        for exchange in self.exchanges:
            if set(exchange(own)) != {own}:
                own = "0" * 16  # so the ranks of the next group learn of it
        if own == "0" * 16:
            order = {f"{direction} through the units": self.units}
            agreed(int, *self.groups, error=CollectiveError, **order)


class PatientPass:
    """A part that keeps gloo's threads from interrupting forward and backward.

    Their messages are seldom needed at once, and on a machine without spare cores they
    would take time from the threads that compute (`collectives.patience`).
    """

    def __init__(self) -> None:
        self.threads, self.stack = socket_threads(), ExitStack()

    def before_forward(self, fsdp: Sharded) -> None:
        """Schedule gloo's threads so that they wait for a free core."""
        self.stack.enter_context(patient(self.threads))

    before_backward = before_forward

    def after_forward(self, fsdp: Sharded) -> None:
        """Restore the ordinary scheduling of gloo's threads."""
        self.stack.close()

    after_backward = tidied = after_forward


class Cast:
    """A part that casts floating-point inputs of the module and of its units."""

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


# ---- shards in the memory of the CPU ------------------------------------------------


class OffloadedStorage(FlatStorage):
    """A FlatStorage with its shard on the CPU; a GPU computes with the parameters.

    With shards, gradients and optimizer states on the CPU, the GPU stores only the
    gathered units and activations. Every gather then begins with a copy of this rank's
    1/N to the GPU, every reduce-scatter ends with a copy back, and the CPU runs the
    optimizer's step. Ren et al. 2021, "ZeRO-Offload", section 4.

    The CPU memory is pinned, so that the GPU can copy by itself while the CPU goes on
    (`non_blocking=True`). `settle` waits for the last copy; before that, a gradient may
    not have arrived. The copies run in the stream that computes, so they do not overlap
    with computation.
    """

    PIN = True

    def empty(self, numel: int, like: Tensor) -> Tensor:
        """Allocate pinned memory on the CPU."""
        return torch.empty(numel, dtype=like.dtype, device="cpu", pin_memory=self.PIN)

    def add_gradient(self, mean: Tensor) -> None:
        """Copy the mean to the CPU; add it to the pieces' gradients, if they exist."""
        if any(piece.grad is not None for piece in self.pieces.values()):
            super().add_gradient(mean.to("cpu"))
        else:
            on_cpu = self.empty(mean.numel(), self.shard)
            self.keep(on_cpu.copy_(mean, non_blocking=True))


class Offload:
    """A part that waits for gradients on their way to the CPU."""

    def after_backward(self, fsdp: Any) -> None:
        """Wait until all gradients have arrived on the CPU."""
        settle()


def settle() -> None:
    """Wait until all gradients have arrived on the CPU."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


# ---- prefetch -----------------------------------------------------------------------


class Order:
    """The order in which a step uses the units: a guess for the next step.

    In forward, while block 3 computes, block 4 can be gathered: that is a *prefetch*.
    It requires knowing which unit comes after block 3. The model's code decides that
    when it runs, so the last forward's order is taken as a guess for the next one, and
    its reverse for backward. A wrong guess costs gathers that were not needed.

    Args:
        guess: the numbers of the units, in the order before the first forward.
        prefetch: the number of units to gather ahead.
    """

    def __init__(self, guess: Sequence[int], prefetch: int) -> None:
        self.units = list(guess)
        self.prefetch = prefetch
        self._at = 0  # forward: number of units used; backward: number of units left

    def begin_forward(self) -> list[int]:
        """Return the units to gather ahead when a forward begins."""
        self._at = 0
        return self.units[: self.prefetch]

    def forward(self, unit: int) -> list[int]:
        """Record that forward uses `unit`; return the units to gather ahead."""
        if self._at == len(self.units) or self.units[self._at] != unit:
            self.units[self._at :] = [unit]  # the order differs from the last forward
        self._at += 1
        return self.units[self._at : self._at + self.prefetch]

    def end_forward(self) -> None:
        """Drop the units of the last forward that this forward did not use."""
        del self.units[self._at :]

    def begin_backward(self) -> list[int]:
        """Return the units to gather ahead when a backward begins."""
        self._at = len(self.units)
        return self.units[::-1][: self.prefetch]

    def backward(self, unit: int) -> list[int]:
        """Record that backward reaches `unit`; return the units to gather ahead."""
        for start in (self._at, len(self.units)):  # a unit may be used twice
            if unit in self.units[:start]:
                self._at = start - 1 - self.units[:start][::-1].index(unit)
                ahead = max(0, self._at - self.prefetch)
                return self.units[ahead : self._at][::-1]
        return []
