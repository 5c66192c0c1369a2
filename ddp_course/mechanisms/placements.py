"""Placements: which rank has which part of which parameter.

A strategy that divides parameters over the ranks of a group records each division:

    place(weight, tp_group, Shard(0), name="head.out.weight", shape=(96, 144))
    place(piece, dp_group, Flat(0, 3456), like=weight)

From then on the tensor has a `Placed`: the way from the plain model's parameter to this
rank's part, one step for each group:

    head.out.weight (96, 144): Shard(dim=0), 1 of 2; Flat(first=0, last=3456), 0 of 2

The steps add up: ZeRO-3 need not know that tensor parallelism has divided a tensor
before. Applied backwards, the steps assemble the plain model (`assembly`). Each number
of the model is *owned* by one of the ranks that have it, so that a norm counts it once
(`total_norm`). DTensor has the same placements for its meshes, `Replicate()` and
`Shard(dim)` (torch/distributed/tensor/placement_types.py).

Strategies also leave notes here for the guards around PyTorch's tools (`guards`).
Chapters 08, 09 and 17.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, nan, prod
from weakref import WeakValueDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class Replicate:
    """Every rank of the group has the whole tensor."""


@dataclass(frozen=True)
class Shard:
    """Every rank has one of N equal parts along dimension `dim`, in rank order."""

    dim: int


@dataclass(frozen=True)
class Flat:
    """This rank has the elements [first, last), counted in memory order."""

    first: int
    last: int


@dataclass(frozen=True)
class OnRanks:
    """The given `ranks` of the group have the whole tensor, as in a pipeline."""

    ranks: tuple[int, ...]


Placement = Replicate | Shard | Flat | OnRanks


@dataclass(frozen=True)
class Step:
    """The division of one tensor by the ranks of one group, as one rank sees it.

    Attributes:
        placement: this rank's part.
        rank, size: this rank's number in the group, and the group's size.
        shape, stride: those of the tensor that was divided, without gaps in memory.
        group: the group; None in a copy that another process has received.
    """

    placement: Placement
    rank: int
    size: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple:
        """Pickle without the process group, which cannot be sent."""
        return Step, (self.placement, self.rank, self.size, self.shape, self.stride)

    @property
    def owns(self) -> bool:
        """Whether this rank owns its part: it is the first rank that has this part."""
        if isinstance(self.placement, OnRanks):
            return self.rank == self.placement.ranks[0]
        return self.rank == 0 or not isinstance(self.placement, Replicate)

    def part(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor; a view if the strides are the same."""
        if isinstance(self.placement, Shard):
            return tensor.tensor_split(self.size, self.placement.dim)[self.rank]
        if isinstance(self.placement, Flat):
            flat = in_memory_order(tensor, self.stride)
            return flat[self.placement.first : self.placement.last]
        return tensor

    def zero_pad(self, part: Tensor) -> Tensor:
        """Return a tensor of the undivided shape: this rank's part, zeros elsewhere."""
        if isinstance(self.placement, (Replicate, OnRanks)):
            return part
        where = {"dtype": part.dtype, "device": part.device}
        whole = torch.empty_strided(self.shape, self.stride, **where).zero_()
        self.part(whole).copy_(part)  # `part` returns a view
        return whole

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        if isinstance(self.placement, Flat):
            return (self.placement.last - self.placement.first,)
        return tuple(self.part(torch.empty(self.shape, device="meta")).shape)

    def __str__(self) -> str:
        return f"{self.placement}, {self.rank} of {self.size}"


@dataclass(frozen=True)
class Placed:
    """The way from a parameter of the plain model to this rank's part of it.

    Attributes:
        name, shape: those in the plain model.
        steps: the divisions, one per group, in order.
    """

    name: str
    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    @property
    def owned(self) -> bool:
        """Whether this rank owns its numbers: exactly one rank that has them does."""
        return all(step.owns for step in self.steps)

    @property
    def divided(self) -> bool:
        """Whether other ranks have other parts of the parameter, or of the model."""
        several = (step.placement for step in self.steps if step.size > 1)
        return any(not isinstance(placement, Replicate) for placement in several)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the whole parameter, or of a tensor like it."""
        for step in self.steps:
            whole = step.part(whole)
        return whole

    def __str__(self) -> str:
        return f"{self.name} {self.shape}: {'; '.join(map(str, self.steps))}"


# id -> placed tensor that is still alive, for guards that have to find a gradient's
# parameter. (Tensors cannot be keys: their `==` compares elements.)
PLACED: WeakValueDictionary[int, Tensor] = WeakValueDictionary()


def place(
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    placement: Placement,
    *,
    like: Tensor | None = None,
    name: str | None = None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """Record how `tensor` was cut along `group`, and return it.

    Replaces an earlier record for the same group.

    Args:
        tensor: this rank's part: a parameter, or a piece of one.
        group: the ranks that divide it; None: all ranks.
        placement: this rank's part.
        like: the tensor that `tensor` was cut from; its steps are kept.
        name, shape: those of the plain model's parameter, if `like` is None or has not
            been placed; the default shape is that of `like`, or of `tensor`.
    """
    source = tensor if like is None else like
    before = placed(source)
    if before is None:
        before = Placed(name or "", tuple(source.shape if shape is None else shape))
    group = dist.group.WORLD if group is None else group
    step = Step(
        placement,
        dist.get_rank(group),
        dist.get_world_size(group),
        tuple(source.shape),
        dense_stride(source),
        group,
    )
    steps = [one for one in before.steps if one.group != group]
    tensor.placed = Placed(before.name, before.shape, (*steps, step))
    PLACED[id(tensor)] = tensor
    return tensor


def placed(tensor: Tensor) -> Placed | None:
    """Return how a tensor was placed; None if it was not."""
    return getattr(tensor, "placed", None)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of `tensor`, or of its copy if it has gaps in memory."""
    return tuple(torch.empty_like(tensor, device="meta").stride())


def in_memory_order(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return the elements of `tensor`, flat, in the memory order of `stride`.

    A view if `tensor` has these strides. (The stride of a dimension of one element has
    no meaning, and may differ.)
    """
    pairs = zip(tensor.shape, tensor.stride(), stride, strict=True)
    if any(length > 1 and own != other for length, own, other in pairs):
        where = {"dtype": tensor.dtype, "device": tensor.device}
        tensor = torch.empty_strided(tensor.shape, stride, **where).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def groups_of(tensors: Iterable[Tensor]) -> list[dist.ProcessGroup]:
    """Return the groups along which any of the tensors was divided, in order."""
    steps = [step for t in tensors if (p := placed(t)) for step in p.steps]
    return list(dict.fromkeys(step.group for step in steps))


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which any rank of the group can reduce; for NCCL a GPU."""
    if "nccl" in dist.get_backend_config(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


# ---- divisions within divisions ------------------------------------------------------
#
# Expert parallelism cuts experts along ep, which is a part of data parallelism; ZeRO
# then cuts each rank's experts along the other part. Both together are one division
# among all ranks of data parallelism: a flat piece of a rank's experts is a flat piece
# of all experts, too, because experts are stacked along the first dimension. Then norms
# and states are assembled along that one group, as for any other parameter. Chapter 17.


def is_within(group: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Return whether all ranks of `group` are in `other`."""
    ranks = dist.get_process_group_ranks
    return {*ranks(group)} <= {*ranks(other)}


def groups_around(
    group: dist.ProcessGroup, before: Iterable[dist.ProcessGroup]
) -> list[dist.ProcessGroup]:
    """Return `before` and `group`, without the groups that lie within `group`."""
    return [*(each for each in before if not is_within(each, group)), group]


def flat_in_whole(step: Step, piece: Flat) -> Flat:
    """Return where a flat piece of this rank's part is in the undivided tensor."""
    if isinstance(step.placement, Replicate):
        return piece
    if step.placement != Shard(0) or step.shape[0] % step.size:
        raise ValueError(f"a flat piece of {step} is not flat in the whole tensor")
    before = step.rank * prod(step.shape) // step.size
    return Flat(before + piece.first, before + piece.last)


def place_piece(
    piece: Tensor, group: dist.ProcessGroup, flat: Flat, like: Tensor, name: str
) -> None:
    """Record how a piece was cut along `group` from a parameter, `like`.

    If `like` was divided along a part of the group before, both divisions become one.
    """
    place(piece, group, flat, like=like, name=name)
    before = placed(like)
    for step in () if before is None else before.steps:
        if is_within(step.group, group):
            outside = [one for one in before.steps if one is not step]
            own = dist.get_rank(group), dist.get_world_size(group)
            whole = flat_in_whole(step, flat)
            joined = Step(whole, *own, step.shape, step.stride, group)
            piece.placed = Placed(before.name, before.shape, (*outside, joined))
            PLACED[id(piece)] = piece


# ---- notes for `guards` --------------------------------------------------------------

# A parameter with only a part of its averaged gradient -> the optimizer that averages.
AVERAGED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def leave_behind(parameters: Iterable[Tensor], by: str) -> None:
    """Record that the strategy `by` trains other tensors in place of these."""
    for parameter in parameters:
        parameter.left_behind = by


def mark_part_averaged(parameters: Iterable[Tensor], optimizer: Optimizer) -> None:
    """Record that `optimizer` averages only parts of these parameters' gradients."""
    for parameter in parameters:
        AVERAGED[parameter] = ref(optimizer)


# ---- the norm of the whole model's gradient ------------------------------------------


def total_norm(
    tensors: Iterable[Tensor],
    groups: Iterable[dist.ProcessGroup] | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """Return the norm of the whole model's gradient, in float64, on all ranks.

    The norms of parts cannot be added, but their squares can: first those of the
    gradients that this rank owns, then over the ranks along each group. For a p-norm,
    p-th powers are added; for inf, maxima are taken.

    Args:
        tensors: this rank's parts, each with a `grad` or None.
        groups: the groups that divide the model; None: those of the tensors. Pass them
            where a rank may have no tensor.
        norm_type: p, above 0; inf is the largest absolute number.

    Like torch.nn.utils.get_total_norm. Raises ValueError unless `norm_type` is above 0.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type!r}; it must be above 0, or inf")
    tensors = list(tensors)
    groups = groups_of(tensors) if groups is None else groups
    own = [t for t in tensors if (way := placed(t)) is None or way.owned]
    grads = [t.grad for t in own if t.grad is not None and t.grad.numel()]
    norms = torch._foreach_norm(grads, norm_type) if grads else [torch.zeros(())]
    each = torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])
    largest = norm_type == inf
    total = each.max() if largest else (each**norm_type).sum()
    if largest:  # the ranks' maximum may lose a nan, so send whether there is one
        total = torch.stack([total, total.isnan().to(total)])
    for group in groups:
        total = total.to(device_of(group))
        operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        dist.all_reduce(total, operation, group)
    return total[0].where(total[1] == 0, nan) if largest else total ** (1 / norm_type)


@torch.no_grad()
def clip_grad_norm_(
    tensors: Iterable[Tensor],
    max_norm: float,
    groups: Iterable[dist.ProcessGroup] | None = None,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale all gradients so that the whole model's norm is at most `max_norm`.

    Returns the norm before scaling. All ranks along the groups call it. PyTorch's
    clip_grad_norm_ would take each rank's part for the whole. Chapter 07.
    """
    if not float(max_norm) >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; it must be a number, 0 or more")
    tensors = list(tensors)
    norm = total_norm(tensors, groups, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if grads := [tensor.grad for tensor in tensors if tensor.grad is not None]:
        torch._foreach_mul_(grads, factor.to(grads[0].device))
    return norm.float()
