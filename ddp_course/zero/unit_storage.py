"""The memory behind the units: a shard of each parameter always, all of it at times.

A unit's parameters are seen in two ways:

    whole    what is computed with: the module's own parameters, views of one tensor,
             whose storage is as long as needed when the unit is gathered, and 0 bytes
             long when it is freed. Whatever autograd has saved for backward finds its
             numbers again as soon as the unit is gathered again
    pieces   what is kept: this rank's part of each parameter, under its name; views of
             one shard. Of most parameters that is all or nothing. An optimizer steps
             them; the modules show `Freed` meanwhile

                    | norm1.weight | attn.qkv.weight . . . | mlp.up.weight . . | . |
    shard of rank   |        0             |         1             |       2       |

so a gather needs no copies, and an optimizer steps parameters that have their plain
names. Chapter 08.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddp_course.mechanisms.buckets import view_of
from ddp_course.zero.units import FlatPlan, UnitPlan

# PyTorch 2.13 has renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

Place = tuple[nn.Module, str]  # where a parameter is: module._parameters[name]


class Messages:
    """How the ranks of a group gather shards and sum gradients: PyTorch's collectives.

    `FullyShardedDataParallel` takes `PeerMessages`: gloo's own reduce-scatter sends
    twice the bytes.
    """

    all_gather = staticmethod(all_gather)

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(
        self,
        whole: Tensor,
        own: Tensor,
        prepare: Callable[[], None],
        async_op: bool = False,
    ) -> Any:
        """Begin to put every rank's shard into its place in `whole`.

        `prepare()` allocates `whole`, and puts this rank's shard into its place `own`.
        Returns an object to wait for, or None.
        """
        prepare()
        options = {"group": self.group, "async_op": async_op}
        return self.all_gather(whole, own, **options)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Sum `whole` over all ranks, this rank's part into `own`; then call `then`."""
        reduce_scatter(own, whole, group=self.group)
        then()

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Sum `tensor` over the ranks of another group: the replicas."""
        dist.all_reduce(tensor, group=group)


class FlatStorage:
    """Some parameters of a unit: `shard`, this rank's, and at times `whole`.

    Args:
        plan: where each parameter begins.
        parameters: name -> parameter; those of the first rank have the numbers.
        exchange: how the shards are gathered and gradients are summed.
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
        exchange: Messages,
        replicas: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.plan, self.exchange, self.replicas = plan, exchange, replicas
        self.parameters = [parameters[name] for name in plan.parameters]
        numel, rank, size = plan.numel, exchange.rank, exchange.size
        first = self._packed()
        for group in (exchange.group, replicas)[: 1 + (replicas is not None)]:
            dist.broadcast(first, group=group, group_src=0)
        mine = slice(rank * numel // size, (rank + 1) * numel // size)
        self.shard = self.empty(numel // size, first)
        self.shard.copy_(first[mine])
        floating = first.is_floating_point()
        dtype = compute_dtype if floating and compute_dtype else first.dtype
        self.whole = first.to(dtype)
        views = self._views(self.whole)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self.mine = self.whole[mine]
        # Gradients are collected in memory that comes and goes in the same way.
        dtype = reduce_dtype if floating and reduce_dtype else dtype
        self.sum = torch.empty(numel, dtype=dtype, device=first.device)
        self.own, self.slots = self.sum[mine], self._views(self.sum)
        self.scale = 1 / size / (1 if replicas is None else replicas.size())
        for flat in (self.whole, self.sum):
            flat.untyped_storage().resize_(0)
        self.pieces = {
            name: nn.Parameter(view, requires_grad=p.requires_grad)
            for name, view, p in zip(
                plan.parameters, self._cut(self.shard), self.parameters, strict=True
            )
        }
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
        """Return the part of each parameter in a tensor laid out as the shard."""
        pieces = self.plan.pieces(self.exchange.rank, empty=True)
        return [shard[p.offset :][: p.last - p.first] for p in pieces]

    def empty(self, numel: int, like: Tensor) -> Tensor:
        """Allocate a shard, on the device that computes."""
        return torch.empty(numel, dtype=like.dtype, device=like.device)

    # ---- gather and free -------------------------------------------------------------

    def gather(self, async_op: bool) -> Any:
        """Begin to make `whole` whole; return an object to wait for, or None."""
        # Autograd counts changes of a parameter to see whether what it has saved is
        # still the same. These counters are the parameters' own: `whole` has another.
        return self.exchange.gather(self.whole, self.mine, self._prepare, async_op)

    @torch.no_grad()
    def _prepare(self) -> None:
        """Allocate `whole`; copy the shard into its place, cast, or from the CPU."""
        allocate(self.whole)
        self.mine.copy_(self.shard, non_blocking=True)

    def free(self) -> None:
        """Give the memory of `whole` back."""
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
        """Begin to sum over the ranks; return an object to wait for, or None."""
        return self.exchange.reduce(self.own, self.sum, self.reduced)

    def reduced(self) -> None:
        """Add the sum to the other replicas': it is the mean of all ranks then."""
        if self.replicas is not None:
            self.exchange.all_reduce(self.own, self.replicas)
        self.add_gradient(self.own)
        self.sum.untyped_storage().resize_(0)

    def add_gradient(self, mean: Tensor) -> None:
        """Add a mean gradient to the pieces'; its own memory is used otherwise."""
        if all(piece.grad is None for piece in self.pieces.values()):
            self.keep(mean.to(self.shard.dtype, copy=True))
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
        self.gathers: list[Any] | None = None  # under way
        self.sums: list[Any] = []  # reduce-scatters under way
        self._show_freed()

    @property
    def away(self) -> bool:
        """Whether it is neither whole, nor on its way."""
        return not self.here and self.gathers is None

    def start_gather(self, async_op: bool = False) -> None:
        """Begin to gather; with `async_op`, return while messages are under way."""
        self.gathers = [flat.gather(async_op) for flat in self.flats]

    def wait_gathered(self) -> None:
        """Return when the unit is whole; start its gather if nobody has."""
        if self.here:
            return
        if self.away:
            self.start_gather()
        works, self.gathers = self.gathers, None
        _wait_for(works)
        for (module, name), parameter, _ in self.places:
            module._parameters[name] = parameter
        self.here = True

    def free(self) -> None:
        """Give the memory back; wait for a gather that is under way first."""
        if self.gathers is not None:
            self.wait_gathered()
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

    def start_reduce(self) -> None:
        """Begin to sum the gradients that autograd has left."""
        for flat in self.trainable:
            if flat.has_gradients:
                flat.collect()
                self.sums.append(flat.reduce())

    def wait_reduced(self) -> None:
        """Return when the mean gradients are in the pieces' `grad`."""
        sums, self.sums = self.sums, []
        _wait_for(sums)


def allocate(flat: Tensor) -> None:
    """Allocate the memory of a tensor that had been given back."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def _wait_for(works: Iterable[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def places_in(module: nn.Module) -> dict[str, list[Place]]:
    """Return all places of each parameter, by name: a tied one has several."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    found: dict[str, list[Place]] = {name: [] for name in names.values()}
    for owner in module.modules():
        for name, parameter in owner.named_parameters("", False, False):
            found[names[parameter]].append((owner, name))
    return found


# ---- what stands in a module for a parameter that is not whole -----------------------


class ShardedError(RuntimeError):
    """Something that cannot be done while each rank has only its pieces."""


@dataclass(frozen=True, repr=False)
class Freed:
    """Stands for a parameter that is not whole at present; knows its form.

    A tensor whose storage is 0 bytes long looks like any other, and a piece of a
    parameter like a small one: who computes with them gets nonsense, or the process
    ends. Whoever uses a Freed gets an error that names the parameter.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __getattr__(self, attribute: str) -> Any:
        # copy and pickle probe for special methods; PyTorch asks for this one where a
        # parameter is assigned, as it is when weights are tied
        if attribute.startswith("__") and attribute != "__qualname__":
            raise AttributeError(attribute)
        raise ShardedError(
            f"{self.name} has no numbers at present (.{attribute}): each rank has its "
            "piece of them, and they are whole while their unit computes. Elsewhere, "
            "call full_state_dict()"
        )

    def __repr__(self) -> str:
        """Say what it is; PyTorch's errors, as of functional_call, show this text."""
        return (
            f"{self.name}, of which each rank has its piece now (sharded modules take "
            "no parameters from outside)"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse any function of PyTorch that is called with a Freed."""
        leaves = tree_leaves((args, kwargs))
        freed = next(leaf for leaf in leaves if isinstance(leaf, cls))
        return freed.__getattr__(getattr(function, "__name__", "numbers"))


def is_sharded(module: nn.Module) -> bool:
    """Tell whether parameters of `module` are in shards already."""
    owners = module.modules()
    return any(isinstance(p, Freed) for m in owners for p in m._parameters.values())
