"""Where tensors enter and leave a parallel region: pairs of operations of autograd.

A tensor of a parallel layer is in one of three states on the ranks of a group:

    replicated   every rank has the whole tensor, with the same numbers
    cut          every rank has a part of the tensor, along one dimension
    a summand    every rank has a tensor of its full shape; only their sum has a meaning

Each operation leads from one state to another, and backward leads the gradient back by
the transposed map. So the operations come in pairs; each is the other's backward:

    forward                                          its backward is
    copy_to_group      replicated -> replicated      reduce_from_group     (`layers`)
    reduce_from_group  summand -> replicated         copy_to_group         (`layers`)
    split_to_group     replicated -> cut             gather_from_group
    gather_from_group  cut -> replicated             split_to_group
    gather_sequence    cut -> replicated             scatter_sequence
    scatter_sequence   summand -> cut                gather_sequence

The two gathers do the same in forward. They differ in what the ranks compute with the
result. After `gather_from_group` all compute the same, so all have the same gradient,
and each takes its part. After `gather_sequence` each computes something of its own, so
the gradients are summands.

Sequence parallelism: between two parallel regions every rank would compute the same
norm, residual and dropout of all tokens, and keep the same activations for backward.
Instead each rank has its T/tp tokens of the sequence; the regions are entered by
`gather_sequence` and left by `scatter_sequence`, which together send what one
all-reduce does. Parameters between the regions are whole on all ranks, but each rank
uses them for its own tokens only: so their gradients are summed over the group
(`OwnTokensLayer`). This sum is easily forgotten, and only wrong numbers show that it
is missing. These gradients are small, and a short message takes as long as a longer
one: so one all-reduce sums those of all norms and biases (`summed_together`). The
position embedding, a matrix, is summed by itself (`SequenceParallelPositions`).

megatron/core/tensor_parallel/mappings.py; Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 4.2.2. Chapter 09.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ddp_course.mechanisms.exchange import Group, MessageExchange, exchange_of
from ddp_course.tensor_parallel.layers import ParallelLayer, copy_to_group

Map = Callable[[MessageExchange, Tensor, int], Tensor]


class Exchanged(Function):
    """A map along `dim`, with the transposed map as its backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: MessageExchange,
        dim: int,
        apply: Map,
        transposed: Map,
    ) -> Tensor:
        """Apply the map."""
        ctx.backward_args = group, dim, transposed, apply
        return apply(group, x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the transposed map to the gradient."""
        return Exchanged.apply(gradient, *ctx.backward_args), None, None, None, None


def _own_part(group: MessageExchange, x: Tensor, dim: int) -> Tensor:
    return group.parts(x, dim)[group.rank].contiguous()


def _all_gather(group: MessageExchange, x: Tensor, dim: int) -> Tensor:
    return group.all_gather(x, dim)


def _reduce_scatter(group: MessageExchange, x: Tensor, dim: int) -> Tensor:
    return group.reduce_scatter(group.buffer(x.shape, x).copy_(x), dim)


def split_to_group(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Return this rank's part of `x` along `dim`; in backward, join the gradients.

    Nothing is sent in forward. Raises ValueError if the parts would differ in length.
    """
    return Exchanged.apply(x, exchange_of(group), dim, _own_part, _all_gather)


def gather_from_group(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Return all ranks' parts joined along `dim`; backward keeps this rank's part."""
    return Exchanged.apply(x, exchange_of(group), dim, _all_gather, _own_part)


def gather_sequence(x: Tensor, group: Group = None) -> Tensor:
    """Return all ranks' parts of the sequence joined; in backward, sum and cut.

    (B, T/tp, C) -> (B, T, C). An all-gather; its backward is a reduce-scatter.
    """
    return Exchanged.apply(x, exchange_of(group), 1, _all_gather, _reduce_scatter)


def scatter_sequence(x: Tensor, group: Group = None) -> Tensor:
    """Sum all ranks' `x`; return this rank's part of the sequence.

    (B, T, C) -> (B, T/tp, C). A reduce-scatter; its backward is an all-gather. The two
    together send what one all-reduce does. Raises ValueError if T cannot be cut
    equally.
    """
    return Exchanged.apply(x, exchange_of(group), 1, _reduce_scatter, _all_gather)


# ---- layers between two parallel regions ---------------------------------------------


def copy_all_to_group(tensors: Sequence[Tensor], group: Group = None) -> list[Tensor]:
    """Return `tensors`; in backward, sum all their gradients in one all-reduce.

    The all-reduce begins when the gradients of all tensors are complete.
    """
    joined = copy_to_group(torch.cat([t.flatten() for t in tensors]), group)
    parts = joined.split([t.numel() for t in tensors])
    return [part.view_as(t).to(t.dtype) for part, t in zip(parts, tensors, strict=True)]


class OwnTokensLayer(ParallelLayer):
    """A layer with whole parameters that each rank uses for its own tokens only.

    Attributes:
        copies: copies of the whole parameters, in a `summed_together` block.
    """

    copies: Sequence[Tensor] = ()

    def whole_parameters(self) -> list[Tensor]:
        """Return the parameters that are whole on all ranks."""
        return [self.weight, self.bias]

    def summed(self) -> Sequence[Tensor]:
        """Return the whole parameters; in backward, sum their gradients."""
        return self.copies or copy_all_to_group(self.whole_parameters(), self.group)


@contextmanager
def summed_together(model: nn.Module, group: Group = None) -> Iterator[None]:
    """Sum the gradients of all `OwnTokensLayer`s in `model` in one all-reduce.

    Run one forward in the block. The all-reduce follows when backward has reached the
    first of the layers. A layer that stage 3 gathers only while it computes is left
    out: it sums its own gradients.
    """
    layers = [m for m in model.modules() if isinstance(m, OwnTokensLayer)]
    layers = [m for m in layers if all(map(torch.is_tensor, m.whole_parameters()))]
    wholes = [layer.whole_parameters() for layer in layers]
    parameters = [p for whole in wholes for p in whole]
    copies = iter(copy_all_to_group(parameters, group) if parameters else ())
    for layer, whole in zip(layers, wholes, strict=True):
        layer.copies = [next(copies) for _ in whole]
    try:
        yield
    finally:
        for layer in layers:
            layer.copies = ()


class SequenceParallelLayerNorm(OwnTokensLayer):
    """LayerNorm of this rank's part of the sequence: (B, T/tp, C) -> (B, T/tp, C)."""

    CUTS = MappingProxyType({"weight": None, "bias": None})

    def __init__(self, full: nn.LayerNorm, group: Group = None) -> None:
        super().__init__(full, group)
        self.shape, self.eps = full.normalized_shape, full.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise. The gradients of weight and bias are summed over the ranks."""
        return F.layer_norm(x, self.shape, *self.summed(), self.eps)


class SequenceParallelPositions(ParallelLayer):
    """The position embedding of this rank's part of the sequence: (T,) -> (T/tp, C)."""

    CUTS = MappingProxyType({"weight": None})

    def forward(self, positions: Tensor) -> Tensor:
        """Embed this rank's positions."""
        own = split_to_group(positions, 0, self.group)  # (T/tp,)
        return F.embedding(own, copy_to_group(self.weight, self.group))  # (T/tp, C)
