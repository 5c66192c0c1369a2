"""The memory behind the units: a shard of each parameter always, all of it at times.

A parameter of the module stays the same object all the time; what comes and goes is the
memory below it. All parameters of a flat are views of one tensor, `whole`, and that
one's storage is made as long as needed when the unit is gathered, and 0 bytes long when
it is freed. So whatever autograd has saved for backward, be it the parameter or a view
of it, finds its numbers again as soon as the unit is gathered again.
Meanwhile its modules have something else in place of their parameters (`freed`).
Chapter 08.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.measure import label
from ddp_course.zero.flat import view_of
from ddp_course.zero.freed import Place
from ddp_course.zero.gather import Messages, SharedMemory, allocate, part_of
from ddp_course.zero.offload import Home
from ddp_course.zero.units import Flat, UnitPlan


class LiveFlat:
    """Some parameters of a unit: `shard`, this rank's, and at times `whole`.

    Args:
        plan: where each parameter begins.
        parameters: name -> parameter; those of rank 0 have the numbers to be sharded.
        way: how shards come together.
        home: where shards and their gradients lie.
        compute_dtype: what `whole` is gathered in, None as it is.
        reduce_dtype: what gradients are summed in, None as `whole`.
    """

    @torch.no_grad()
    def __init__(
        self,
        plan: Flat,
        parameters: Mapping[str, nn.Parameter],
        way: Messages | SharedMemory,
        home: Home,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.plan, self.way, self.home = plan, way, home
        self.names = plan.sharded.bucket.parameters
        self.parameters = [parameters[name] for name in self.names]
        rank, size, numel = way.comm.rank, way.comm.size, plan.sharded.numel
        first = self.packed()
        dist.broadcast(first, way.comm.ranks[0], way.group)
        shard = home.empty(way, numel // size, first.dtype, first.device)
        shard.copy_(part_of(first, rank, size))
        self.shard = nn.Parameter(shard, requires_grad=plan.trainable)
        floating = first.is_floating_point()
        dtype = compute_dtype if floating and compute_dtype else first.dtype
        lasting = way.lasting(shard) if dtype == first.dtype else None
        self.lasts = lasting is not None
        self.whole = lasting if self.lasts else first.to(dtype)
        for parameter, view in zip(
            self.parameters, self.views(self.whole), strict=True
        ):
            parameter.data = view
        self.mine = part_of(self.whole, rank, size)
        # Gradients are collected in memory that comes and goes in the same way.
        dtype = reduce_dtype if floating and reduce_dtype else dtype
        self.sum = torch.empty(numel, dtype=dtype, device=first.device)
        self.own, self.slots = part_of(self.sum, rank, size), self.views(self.sum)
        self.scale = 1 / size
        for flat in (self.sum,) if self.lasts else (self.whole, self.sum):
            label(flat, "communication buffers").untyped_storage().resize_(0)

    def packed(self) -> Tensor:
        """Return the parameters side by side, followed by zeros."""
        bucket, numel = self.plan.sharded.bucket, self.plan.sharded.numel
        flat = torch.zeros(numel, dtype=bucket.dtype, device=bucket.device)
        for view, parameter in zip(self.views(flat), self.parameters, strict=True):
            view.copy_(parameter)
        return flat

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each parameter in a flat tensor, in its shape."""
        offsets = self.plan.sharded.bucket.offsets
        pairs = zip(offsets, self.parameters, strict=True)
        return [view_of(flat, offset, parameter) for offset, parameter in pairs]

    # ---- gather and free -------------------------------------------------------------

    def gather(self, async_op: bool) -> Any:
        """Begin to make `whole` whole; return something to wait for, or None."""
        if self.lasts:
            return None
        # Autograd counts changes of a parameter to see whether what it has saved is
        # still the same. These counters are the parameters' own: `whole` has another.
        shard = self.shard.detach()
        return self.way.gather(self.whole, self.mine, shard, async_op)

    def free(self) -> None:
        """Give the memory of `whole` back."""
        if not self.lasts:
            self.whole.untyped_storage().resize_(0)

    # ---- gradients -------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether autograd has left gradients at the parameters."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def collect(self) -> None:
        """Put this rank's share of all gradients into `sum`, and let go of them.

        Copied and scaled in one pass over the memory, and freed one by one.
        """
        allocate(self.sum)
        for view, parameter in zip(self.slots, self.parameters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                view.zero_()
            elif gradient.dtype == view.dtype:
                torch.mul(gradient.detach(), self.scale, out=view)
            else:  # scaled in the other, most often more precise, type
                view.copy_(gradient.detach()).mul_(self.scale)
        self.sum[self.plan.numel :].zero_()

    def reduce(self) -> Any:
        """Begin to sum over the ranks; return something to wait for, or None."""
        return self.way.reduce(self.own, self.sum, self.reduced)

    def reduced(self) -> None:
        """The sum is there: add it to the shard's gradient."""
        self.home.add_gradient(self.shard, self.own)
        self.sum.untyped_storage().resize_(0)


class LiveUnit:
    """A unit with its memory: gathered as one, freed as one.

    Attributes:
        here: whether it is whole.
        open: the calls whose backward is under way.
        since: when it began to compute.
        stays: whether it stays whole from forward to backward.
    """

    def __init__(
        self,
        plan: UnitPlan,
        flats: Sequence[LiveFlat],
        places: Mapping[Tensor, Sequence[Place]],
    ) -> None:
        self.plan, self.flats = plan, list(flats)
        self.trainable = [flat for flat in flats if flat.plan.trainable]
        self.places = [
            place for flat in flats for p in flat.parameters for place in places[p]
        ]
        self.here, self.stays, self.since = False, False, 0.0
        self.open: set[object] = set()
        self.under_way: list[Any] | None = None  # gathers
        self.sums: list[Any] = []  # reduce-scatters
        self._show_freed()

    @property
    def away(self) -> bool:
        """Whether it is neither whole, nor on its way."""
        return not self.here and self.under_way is None

    def launch(self, async_op: bool) -> None:
        """Begin to gather; with `async_op`, meanwhile."""
        self.under_way = [flat.gather(async_op) for flat in self.flats]

    def gather(self) -> None:
        """Return when it is whole."""
        if self.here:
            return
        if self.away:
            self.launch(async_op=False)
        works, self.under_way = self.under_way, None
        for work in works:
            if work is not None:
                work.wait()
        for place in self.places:
            place.module._parameters[place.name] = place.parameter
        self.here = True

    def free(self) -> None:
        """Give the memory back; what is on the way arrives first."""
        if self.under_way is not None:
            self.gather()
        if self.here:
            for flat in self.flats:
                flat.free()
            self._show_freed()
        self.here = False

    def _show_freed(self) -> None:
        for place in self.places:
            place.module._parameters[place.name] = place.freed

    @property
    def has_gradients(self) -> bool:
        """Whether autograd has left gradients at its parameters."""
        return any(flat.has_gradients for flat in self.trainable)

    def reduce(self) -> None:
        """Begin to sum the gradients that have come."""
        for flat in self.trainable:
            if flat.has_gradients:
                flat.collect()
                self.sums.append(flat.reduce())

    def settle(self) -> None:
        """Return when the sums are there, in the shards' gradients."""
        sums, self.sums = self.sums, []
        for work in sums:
            work.wait()

    def forget(self) -> None:
        """Drop all gradients, those of the shards, too."""
        for flat in self.trainable:
            flat.shard.grad = None
            for parameter in flat.parameters:
                parameter.grad = None
