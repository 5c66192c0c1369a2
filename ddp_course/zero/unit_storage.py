"""The memory of the units: shards always, whole parameters while they are gathered.

A unit's parameters exist in two forms:

    whole    the module's own parameters, for computing: views of one tensor. A gather
             allocates its storage, and `free` shrinks the storage to 0 bytes. Tensors
             that autograd saved for backward are valid again after the next gather
    pieces   this rank's part of each parameter, for the optimizer: views of one shard.
             Most pieces are a whole parameter or empty. While the unit is freed, the
             modules have `Freed` objects in place of parameters

                    | norm1.weight | attn.qkv.weight . . . | mlp.up.weight . . | . |
    shard of rank   |        0             |         1             |       2       |

So a gather copies nothing but this rank's shard, and an optimizer steps parameters
under their own names. Chapter 08.
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

# PyTorch 2.13 renamed these two functions.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

Place = tuple[nn.Module, str]  # the parameter is module._parameters[name]


class ShardMessages:
    """The gathers and reductions of shards, with PyTorch's collectives.

    `FullyShardedDataParallel` uses `PeerMessages` instead: gloo's own reduce-scatter
    sends twice the bytes.
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
        """Begin to gather every rank's shard into its place in `whole`.

        `prepare()` allocates `whole`, and copies this rank's shard to its place `own`.
        Returns a handle with `wait()`, or None.
        """
        prepare()
        options = {"group": self.group, "async_op": async_op}
        return self.all_gather(whole, own, **options)

    def reduce(self, own: Tensor, whole: Tensor, then: Callable[[], None]) -> Any:
        """Sum `whole` over all ranks, keep this rank's part in `own`, call `then()`."""
        reduce_scatter(own, whole, group=self.group)
        then()

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        """Sum `tensor` over the ranks of another group: the replicas."""
        dist.all_reduce(tensor, group=group)


class FlatStorage:
    """The memory of a unit's parameters of one type: `shard` and `whole`.

    Args:
        plan: the parameters' offsets.
        parameters: name -> parameter; all ranks get the first rank's values.
        exchange: an object that gathers shards and sums gradients.
        replicas: ranks that have the same shard (hybrid sharding), or None.
        compute_dtype: type of `whole`; None means the type of the parameters.
        reduce_dtype: type in which gradients are summed; None: the type of `whole`.

    Attributes:
        pieces: name -> this rank's part of the parameter, which may be empty.
        missed: names of parameters without a gradient, for which zeros were sent.
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
            dist.broadcast(first, group=group, group_src=0)
        own = slice(rank * numel // size, (rank + 1) * numel // size)
        self.shard = self.empty(numel // size, first)
        self.shard.copy_(first[own])
        floating = first.is_floating_point()
        dtype = compute_dtype if floating and compute_dtype else first.dtype
        self.whole = first.to(dtype)
        views = self._views(self.whole)
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self.own_whole = self.whole[own]
        # Gradients are summed in `sum`, which is allocated and freed as `whole` is.
        dtype = reduce_dtype if floating and reduce_dtype else dtype
        self.sum = torch.empty(numel, dtype=dtype, device=first.device)
        self.own_sum, self.slots = self.sum[own], self._views(self.sum)
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
        bucket = self.plan.bucket
        kind = {"dtype": bucket.dtype, "device": bucket.device}
        flat = torch.zeros(self.plan.numel, **kind)
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
        """Begin to gather `whole`; return a handle with `wait()`, or None."""
        # Autograd raises if a saved parameter's version has changed. Writing to `whole`
        # is allowed, as `whole` and the parameters have separate version counters.
        return self.exchange.gather(self.whole, self.own_whole, self._prepare, async_op)

    @torch.no_grad()
    def _prepare(self) -> None:
        """Allocate `whole`, and copy the shard into its place in it."""
        allocate(self.whole)
        self.own_whole.copy_(self.shard, non_blocking=True)

    def free(self) -> None:
        """Free the memory of `whole`."""
        self.whole.untyped_storage().resize_(0)

    # ---- gradients -------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether the parameters have gradients that were not reduced yet."""
        return any(parameter.grad is not None for parameter in self.parameters)

    def collect(self) -> None:
        """Write all gradients, divided by the number of ranks, into `sum`; free them.

        One pass over memory copies and scales; each gradient is freed at once.
        """
        allocate(self.sum)
        pairs = zip(self.pieces.items(), self.parameters, strict=True)
        missed = (n for (n, piece), p in pairs if p.grad is None and piece.grad is None)
        self.missed = set(missed)
        for view, parameter in zip(self.slots, self.parameters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                view.zero_()
            else:  # cast first, so that scaling happens in the type of the sum
                torch.mul(gradient.detach().to(view.dtype), self.scale, out=view)
        self.sum[self.plan.numel - self.plan.padding :].zero_()

    def reduce(self) -> Any:
        """Begin to sum over the ranks; return a handle with `wait()`, or None."""
        return self.exchange.reduce(self.own_sum, self.sum, self.on_reduced)

    def on_reduced(self) -> None:
        """All-reduce the shard over the replicas, add it to `grad`, free `sum`."""
        if self.replicas is not None:
            self.exchange.all_reduce(self.own_sum, self.replicas)
        self.add_gradient(self.own_sum)
        self.sum.untyped_storage().resize_(0)

    def add_gradient(self, mean: Tensor) -> None:
        """Add a mean gradient to the pieces' `grad`, or set `grad` to a copy of it."""
        if all(piece.grad is None for piece in self.pieces.values()):
            self.keep(mean.to(self.shard.dtype, copy=True))
            return
        for piece, part in zip(self.pieces.values(), self._cut(mean), strict=True):
            part = part.to(piece.device, piece.dtype)
            piece.grad = part.clone() if piece.grad is None else piece.grad.add_(part)

    def keep(self, gradient: Tensor) -> None:
        """Set the pieces' `grad` to their parts of `gradient`."""
        for piece, part in zip(self.pieces.values(), self._cut(gradient), strict=True):
            piece.grad = part


class Unit:
    """A unit with its memory: gathered, freed and reduced as one.

    Attributes:
        is_whole: whether the unit is gathered.
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
        self.is_whole = False
        self.gathers: list[Any] | None = None  # handles of gathers under way
        self.sums: list[Any] = []  # handles of reduce-scatters under way
        self._show_freed()

    @property
    def needs_gather(self) -> bool:
        """Whether the unit is not gathered, and no gather is under way."""
        return not self.is_whole and self.gathers is None

    def start_gather(self, async_op: bool = False) -> None:
        """Begin to gather; with `async_op`, return while messages are under way."""
        self.gathers = [flat.gather(async_op) for flat in self.flats]

    def wait_gathered(self) -> None:
        """Wait until the unit is gathered; start the gather if it was not started."""
        if self.is_whole:
            return
        if self.needs_gather:
            self.start_gather()
        works, self.gathers = self.gathers, None
        _wait_for(works)
        for (module, name), parameter, _ in self.places:
            module._parameters[name] = parameter
        self.is_whole = True

    def free(self) -> None:
        """Free the memory; wait for a gather that is under way first."""
        if self.gathers is not None:
            self.wait_gathered()
        if self.is_whole:
            for flat in self.flats:
                flat.free()
            self._show_freed()
        self.is_whole = False

    def _show_freed(self) -> None:
        for (module, name), _, freed in self.places:
            module._parameters[name] = freed

    @property
    def has_gradients(self) -> bool:
        """Whether the unit has gradients that were not reduced yet."""
        return any(flat.has_gradients for flat in self.trainable)

    def start_reduce(self) -> None:
        """Begin to sum the gradients of all flats, if the unit has any gradient.

        Another rank may have gradients for a flat for which this rank has none.
        """
        for flat in self.trainable if self.has_gradients else ():
            flat.collect()
            self.sums.append(flat.reduce())

    def wait_reduced(self) -> None:
        """Wait until the mean gradients are in the pieces' `grad`."""
        sums, self.sums = self.sums, []
        _wait_for(sums)


def allocate(flat: Tensor) -> None:
    """Allocate the memory of a tensor again, after it was freed."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def _wait_for(works: Iterable[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def places_in(module: nn.Module) -> dict[str, list[Place]]:
    """Return, for each parameter, all its places: a tied parameter has several."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    places: dict[str, list[Place]] = {name: [] for name in names.values()}
    for owner in module.modules():
        for name, parameter in owner.named_parameters("", False, False):
            places[names[parameter]].append((owner, name))
    return places


# ---- placeholders for parameters that are not gathered -------------------------------


class ShardedError(RuntimeError):
    """An error: the operation needs whole parameters, but a rank has only pieces."""


@dataclass(frozen=True, repr=False)
class Freed:
    """A placeholder in a module for a parameter that is not gathered.

    Computing with a tensor of 0 bytes would crash the process, and a piece would give
    nonsense. Any use of a Freed raises an error that names the parameter.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __getattr__(self, attribute: str) -> Any:
        # copy and pickle probe for special methods: no ShardedError for these. But
        # PyTorch reads __qualname__ when this is assigned, e.g. to tie weights.
        if attribute.startswith("__") and attribute != "__qualname__":
            raise AttributeError(attribute)
        raise ShardedError(
            f"{self.name} has no values at present (.{attribute}): each rank has only "
            "a piece of it, and it is gathered only while its unit computes. To "
            "compute, call the wrapper; to read it elsewhere, call full_state_dict"
        )

    def __add__(self, *_: Any) -> Any:
        return self.__getattr__("operator")

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __add__
    __neg__ = __matmul__ = __rmatmul__ = __getitem__ = __float__ = __len__ = __add__

    def __repr__(self) -> str:
        """Return a text that explains errors of PyTorch, such as functional_call's."""
        return (
            f"{self.name}, of which each rank has only a piece now (sharded modules "
            "accept no parameters from outside)"
        )

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise ShardedError from a PyTorch function that is called with a Freed."""
        leaves = tree_leaves((args, kwargs))
        freed = next(leaf for leaf in leaves if isinstance(leaf, cls))
        return freed.__getattr__(getattr(function, "__name__", "numbers"))


def is_sharded(module: nn.Module) -> bool:
    """Return whether parameters of `module` are in shards already."""
    owners = module.modules()
    return any(isinstance(p, Freed) for m in owners for p in m._parameters.values())
