"""What FullyShardedDataParallel adds to the readable stage 3, as parts.

    Kept          refuse parameters that were replaced or changed, and second gradients
    Unused        leave pieces alone that no rank had a gradient for
    SameOrder     do all ranks use the units in one order?
    Patient       gloo's threads interrupt nobody meanwhile
    Cast          floating inputs in another type
    Offload       wait for gradients that are copied to the CPU

Each part hears some of the moments of `stage3_simple`, and knows no other part. With
them are `Order`, which knows what to gather next, and `OffloadedStorage`, the memory of
shards on the CPU. Chapter 08.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ddp_course.collectives.patience import patient, socket_threads
from ddp_course.launch.deadlock import CollectiveError
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.frozen import Frozen, came_later, check_first_order
from ddp_course.mechanisms.guards import leave_behind
from ddp_course.mechanisms.hooks import tensors_in
from ddp_course.zero.stage3_simple import SimpleFullyShardedDataParallel as Sharded
from ddp_course.zero.unit_storage import FlatStorage, Freed, ShardedError, Unit

Group = dist.ProcessGroup
Exchange = Callable[[str], list[str]]  # shows a text to all ranks, returns theirs


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

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = exchanges

    def after_backward(self, fsdp: Sharded) -> None:
        """Compare along all groups; all ranks call it."""
        flats = [flat for unit in fsdp.units for flat in unit.trainable]
        names = [(flat, name) for flat in flats for name in flat.pieces]
        found = "".join("01"[name not in flat.missed] for flat, name in names)
        for exchange in self.exchanges:
            found = "".join(map(max, zip(*exchange(found), strict=True)))
        for (flat, name), by_any in zip(names, found, strict=True):
            if by_any == "0":
                flat.pieces[name].grad = None
        for flat in flats:
            flat.missed.clear()


class SameOrder:
    """Compare the order of the units with the other ranks', after every pass.

    A shard does not say of which unit it is: if one rank gathered block 1 while another
    gathers block 2, each would get a mixture, and nobody would notice.
    """

    def __init__(self, groups: Sequence[Group], exchanges: Sequence[Exchange]) -> None:
        self.groups, self.exchanges = groups, exchanges
        self.units: list[int] = []  # used in this pass, in order

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
        own = hashlib.sha256(repr(self.units).encode()).hexdigest()[:16]
        for exchange in self.exchanges:
            if set(exchange(own)) != {own}:
                own = "0" * 16  # so that the ranks along the next group hear of it
        if own == "0" * 16:
            order = {f"{what} through the units": self.units}
            agreed(int, *self.groups, error=CollectiveError, **order)


class Patient:
    """Let gloo's threads interrupt nobody until the forward or backward has ended.

    What they carry is seldom needed at once, and where there are no more cores than
    ranks, they take the time from those that compute (`collectives.patience`).
    """

    def __init__(self) -> None:
        self.threads, self.stack = socket_threads(), ExitStack()

    def before_forward(self, fsdp: Sharded) -> None:
        """Change how Linux schedules gloo's threads."""
        self.stack.enter_context(patient(self.threads))

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


# ---- shards in the memory of the CPU ------------------------------------------------


class OffloadedStorage(FlatStorage):
    """Its shard lives on the CPU; its parameters are computed with on a GPU.

    With shards, their gradients and the optimizer's states on the CPU, a GPU keeps no
    more than what is gathered at the moment, and activations. Every gather then begins
    with a copy to the GPU of this rank's 1/N, every reduce-scatter ends with one back,
    and the CPU does the optimizer's step. Ren et al. 2021, "ZeRO-Offload", section 4.

    The memory is pinned: the system may not move it, so a GPU copies from and to it by
    itself, while the CPU goes on (`non_blocking=True`). `settle` waits for the last
    copy; before, the numbers of a gradient may not have arrived. The copies take their
    turn in the stream that computes: they are not hidden behind computation.
    """

    PIN = True

    def empty(self, numel: int, like: Tensor) -> Tensor:
        """Allocate pinned memory on the CPU."""
        return torch.empty(numel, dtype=like.dtype, device="cpu", pin_memory=self.PIN)

    def add_gradient(self, mean: Tensor) -> None:
        """Copy the mean to the CPU; add it there, if a gradient is there already."""
        if any(piece.grad is not None for piece in self.pieces.values()):
            super().add_gradient(mean.to("cpu"))
        else:
            home = self.empty(mean.numel(), self.shard)
            self.keep(home.copy_(mean, non_blocking=True))


class Offload:
    """A part that waits for gradients on their way to the CPU."""

    def after_backward(self, fsdp: Any) -> None:
        """Return when all gradients have arrived."""
        settle()


def settle() -> None:
    """Return when all gradients have arrived."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


# ---- what to gather next ------------------------------------------------------------


class Order:
    """Remembers the order in which units (their numbers) are used.

    In forward, while block 3 computes, block 4 can be on its way: that is a *prefetch*.
    So one has to know what comes after block 3. The model's code decides that, and it
    is not known before it has run: the order of the last forward is taken for that of
    the next, and backward is expected to go the same way back. A wrong guess costs a
    gather that was not needed, and nothing else.

    `guess` is the order before the first forward; `prefetch` is how many units are to
    be gathered ahead.
    """

    def __init__(self, guess: Sequence[int], prefetch: int) -> None:
        self.units = list(guess)
        self.prefetch = prefetch
        self._at = 0  # in forward: how many were used; in backward: how many are left

    def begin_forward(self) -> list[int]:
        """Return the units to gather ahead when a forward begins."""
        self._at = 0
        return self.units[: self.prefetch]

    def forward(self, unit: int) -> list[int]:
        """`unit` is used now: return the units to gather ahead."""
        if self._at == len(self.units) or self.units[self._at] != unit:
            self.units[self._at :] = [unit]  # another way than last time
        self._at += 1
        return self.units[self._at : self._at + self.prefetch]

    def end_forward(self) -> None:
        """Forget what was used last time, and not this time."""
        del self.units[self._at :]

    def begin_backward(self) -> list[int]:
        """Return the units to gather ahead when a backward begins, in this order."""
        self._at = len(self.units)
        return self.units[::-1][: self.prefetch]

    def backward(self, unit: int) -> list[int]:
        """Backward reaches `unit`: return the units to gather ahead, in this order."""
        for start in (self._at, len(self.units)):  # of two forwards: once more
            if unit in self.units[:start]:
                self._at = start - 1 - self.units[:start][::-1].index(unit)
                ahead = max(0, self._at - self.prefetch)
                return self.units[ahead : self._at][::-1]
        return []
