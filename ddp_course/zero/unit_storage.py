"""The memory behind the units: a shard of each parameter always, all of it at times.

A unit's parameters are seen in two ways:

    whole    what is computed with: the module's own parameters, views of one tensor,
             whose storage is as long as needed when the unit is gathered, and 0 bytes
             long when it is freed. Whatever autograd has saved for backward finds its
             numbers again as soon as the unit is gathered again
    pieces   what is kept: this rank's part of each parameter, under its name; views of
             one shard. Of most parameters that is all or nothing. An optimizer steps
             them; the modules show `freed.Freed` meanwhile

                    | norm1.weight | attn.qkv.weight . . . | mlp.up.weight . . | . |
    shard of rank   |        0             |         1             |       2       |

so a gather needs no copies, and an optimizer steps parameters that have their plain
names. Chapter 08.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.collectives import communicator, ring_all_reduce
from ddp_course.measure import label
from ddp_course.mechanisms.buckets import view_of
from ddp_course.mechanisms.placements import Flat, place
from ddp_course.mechanisms.shard_exchange import ShardMessages, allocate
from ddp_course.zero.freed import Freed
from ddp_course.zero.units import FlatPlan, UnitPlan

Place = tuple[nn.Module, str]  # where a parameter is: module._parameters[name]


class FlatStorage:
    """Some parameters of a unit: `shard`, this rank's, and at times `whole`.

    Args:
        plan: where each parameter begins.
        parameters: name -> parameter; those of the first rank have the numbers.
        exchange: how the shards come together.
        replicas: ranks that have the same shard (hybrid sharding), or None.
        compute_dtype: what `whole` is gathered in, None as it is.
        reduce_dtype: what gradients are summed in, None as `whole`.

    Attributes:
        pieces: name -> this rank's part of the parameter, which may be empty.
        missed: names of those that get zeros for a gradient, as autograd had none.
    """

    @torch.no_grad()
    def __init__(
        self,
        plan: FlatPlan,
        parameters: Mapping[str, nn.Parameter],
        exchange: ShardMessages,
        replicas: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.plan, self.exchange, self.replicas = plan, exchange, replicas
        self.parameters = [parameters[name] for name in plan.parameters]
        numel, rank, size = plan.numel, exchange.rank, exchange.size
        first = self._packed()
        for group in (exchange.group, replicas)[: 1 + (replicas is not None)]:
            dist.broadcast(first, communicator(group).ranks[0], group)
        mine = slice(rank * numel // size, (rank + 1) * numel // size)
        self.shard = label(self.empty(numel // size, first), "parameters")
        self.shard.copy_(first[mine])
        floating = first.is_floating_point()
        dtype = compute_dtype if floating and compute_dtype else first.dtype
        lasting = exchange.lasting(self.shard) if dtype == first.dtype else None
        self.lasts = lasting is not None
        self.whole = lasting if self.lasts else first.to(dtype)
        views = self._views(self.whole)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self.mine = self.whole[mine]
        # Gradients are collected in memory that comes and goes in the same way.
        dtype = reduce_dtype if floating and reduce_dtype else dtype
        self.sum = torch.empty(numel, dtype=dtype, device=first.device)
        self.own, self.slots = self.sum[mine], self._views(self.sum)
        self.scale = 1 / size / (1 if replicas is None else replicas.size())
        for flat in (self.sum,) if self.lasts else (self.whole, self.sum):
            label(flat, "communication buffers").untyped_storage().resize_(0)
        self.pieces = dict(self._pieces())
        self.missed: set[str] = set()

    def _packed(self) -> Tensor:
        """Return the parameters side by side, followed by zeros."""
        of = self.plan.bucket
        flat = torch.zeros(self.plan.numel, dtype=of.dtype, device=of.device)
        for view, parameter in zip(self._views(flat), self.parameters, strict=True):
            view.copy_(parameter)
        return flat

    def _views(self, flat: Tensor) -> list[Tensor]:
        """Return the part of each parameter in a flat tensor, in its shape."""
        offsets = zip(self.plan.offsets, self.parameters, strict=True)
        return [view_of(flat, offset, parameter) for offset, parameter in offsets]

    def _cut(self, shard: Tensor) -> list[Tensor]:
        """Return the part of each parameter in what lies as the shard does."""
        pieces = self.plan.pieces(self.exchange.rank, empty=True)
        return [shard[p.offset :][: p.last - p.first] for p in pieces]

    def _pieces(self) -> Iterator[tuple[str, nn.Parameter]]:
        plan = self.plan.pieces(self.exchange.rank, empty=True)
        views = self._cut(self.shard)
        for piece, view, whole in zip(plan, views, self.parameters, strict=True):
            kept = nn.Parameter(view, requires_grad=whole.requires_grad)
            way = self.exchange.group, Flat(piece.first, piece.last)
            name = piece.parameter
            yield name, place(kept, *way, like=whole, name=name)

    def empty(self, numel: int, like: Tensor) -> Tensor:
        """Return memory for a shard: where it is computed with."""
        return self.exchange.empty_shard(numel, like.dtype, like.device)

    # ---- gather and free -------------------------------------------------------------

    def gather(self, async_op: bool) -> Any:
        """Begin to make `whole` whole; return something to wait for, or None."""
        if self.lasts:
            return None
        # Autograd counts changes of a parameter to see whether what it has saved is
        # still the same. These counters are the parameters' own: `whole` has another.
        return self.exchange.gather(self.whole, self.mine, self.shard, async_op)

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
        pairs = zip(self.pieces.items(), self.parameters, strict=True)
        missed = (n for (n, piece), p in pairs if p.grad is None and piece.grad is None)
        self.missed = set(missed)
        for view, parameter in zip(self.slots, self.parameters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                view.zero_()
            else:  # scaled in the type of the sum, if that is another
                torch.mul(gradient.detach().to(view.dtype), self.scale, out=view)
        self.sum[self.plan.numel - self.plan.padding :].zero_()

    def reduce(self) -> Any:
        """Begin to sum over the ranks; return something to wait for, or None."""
        return self.exchange.reduce(self.own, self.sum, self.reduced)

    def reduced(self) -> None:
        """The sum is there: with the other replicas' it is the mean of all ranks."""
        if self.replicas is not None:
            all_reduce = dist.all_reduce if self.own.is_cuda else ring_all_reduce
            all_reduce(self.own, group=self.replicas)
        self.add_gradient(self.own)
        self.sum.untyped_storage().resize_(0)

    def add_gradient(self, mean: Tensor) -> None:
        """Add a mean gradient to the pieces'; its own memory is used otherwise."""
        if all(piece.grad is None for piece in self.pieces.values()):
            self.keep(label(mean.to(self.shard.dtype, copy=True), "gradients"))
            return
        for piece, part in zip(self.pieces.values(), self._cut(mean), strict=True):
            part = part.to(piece.device, piece.dtype)
            piece.grad = part.clone() if piece.grad is None else piece.grad.add_(part)

    def keep(self, gradient: Tensor) -> None:
        """Make the parts of `gradient` the pieces' own."""
        for piece, part in zip(self.pieces.values(), self._cut(gradient), strict=True):
            piece.grad = part


class Unit:
    """A unit with its memory: gathered as one, freed as one, reduced as one.

    Attributes:
        here: whether it is whole.
    """

    def __init__(
        self,
        plan: UnitPlan,
        flats: Sequence[FlatStorage],
        places: Mapping[str, Sequence[Place]],
    ) -> None:
        self.plan, self.flats = plan, list(flats)
        self.trainable = [flat for flat in flats if flat.plan.trainable]
        self.places = [
            (place, p, Freed(name, p.shape, p.dtype, p.device, p.requires_grad))
            for flat in flats
            for name, p in zip(flat.pieces, flat.parameters, strict=True)
            for place in places[name]
        ]
        self.here = False
        self.under_way: list[Any] | None = None  # gathers
        self.sums: list[Any] = []  # reduce-scatters
        self._show_freed()

    @property
    def away(self) -> bool:
        """Whether it is neither whole, nor on its way."""
        return not self.here and self.under_way is None

    def launch(self, async_op: bool = False) -> None:
        """Begin to gather; with `async_op`, meanwhile."""
        self.under_way = [flat.gather(async_op) for flat in self.flats]

    def gather(self) -> None:
        """Return when it is whole."""
        if self.here:
            return
        if self.away:
            self.launch()
        works, self.under_way = self.under_way, None
        _wait_for(works)
        for (module, name), parameter, _ in self.places:
            module._parameters[name] = parameter
        self.versions = [parameter._version for _, parameter, _ in self.places]
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
        for (module, name), _, freed in self.places:
            module._parameters[name] = freed

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
        """Return when the sums are there, in the pieces' gradients."""
        sums, self.sums = self.sums, []
        _wait_for(sums)


def _wait_for(works: Iterable[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()
