"""Where tensors enter and leave a parallel region: pairs of operations of autograd.

A tensor of a parallel layer is in one of three states on the ranks of a group:

    replicated   every rank has the whole of it, the same numbers
    cut          every rank has a part of it, along one dimension
    a summand    every rank has a tensor of its full shape; the sum is what is meant

Each operation leads from one state to another, and backward leads the gradient back by
the transposed map. So they come in pairs, of which each is the backward of the other:

    forward                                          its backward is
    copy_to_group      replicated -> replicated      reduce_from_group
    reduce_from_group  summand -> replicated         copy_to_group
    split_to_group     replicated -> cut             gather_from_group
    gather_from_group  cut -> replicated             split_to_group
    gather_sequence    cut -> replicated             scatter_sequence
    scatter_sequence   summand -> cut                gather_sequence

The two gathers do the same in forward. They differ in what is computed with the result:
after `gather_from_group` the same on all ranks, so that all have the same gradient, and
each takes its part; after `gather_sequence` each computes something of its own, so that
the gradients are summands. `copy_to_group` does nothing at all in forward, and without
it training goes wrong silently: all before it would get one rank's gradient.

These are f and g, and the sequence-parallel pair, of Megatron-LM
(megatron/core/tensor_parallel/mappings.py); Shoeybi et al. 2019, "Megatron-LM",
section 3; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models", section 4.2.2. Chapter 09.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ddp_course.mechanisms.exchange import Group, MessageExchange, exchange_of

# ---- f and g -------------------------------------------------------------------------


def copy_to_group(x: Tensor, group: Group = None) -> Tensor:
    """Return `x`, which all ranks have; in backward, sum their gradients: f.

    Any shape. `group` is a process group, None for all ranks, or an exchange.
    """
    return CopyToGroup.apply(x, exchange_of(group))


def reduce_from_group(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of all ranks' `x`; in backward, hand the gradient to each: g."""
    return ReduceFromGroup.apply(x, exchange_of(group))


class CopyToGroup(Function):
    """One tensor becomes one on each of N ranks: x -> (x, ..., x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MessageExchange) -> Tensor:
        """Change nothing."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """(g_0, ..., g_N-1) -> g_0 + ... + g_N-1: every rank's use of x counts."""
        return ReduceFromGroup.apply(gradient, ctx.group), None


class ReduceFromGroup(Function):
    """The summands of N ranks become one tensor: (x_0, ..., x_N-1) -> their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MessageExchange) -> Tensor:
        """All-reduce."""
        ctx.group = group
        return group.all_reduce(group.buffer(x.shape, x).copy_(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """g -> (g, ..., g): each summand counts once, on its own rank."""
        return CopyToGroup.apply(gradient, ctx.group), None


def copies_to_group(tensors: list[Tensor], group: Group = None) -> list[Tensor]:
    """Return each tensor as `copy_to_group` does, with one all-reduce for all of them.

    For small parameters, such as weight and bias of a norm: a message costs as much for
    both as for one. They have one type.
    """
    return list(CopiesToGroup.apply(exchange_of(group), *tensors))


class CopiesToGroup(Function):
    """`CopyToGroup` of several tensors."""

    @staticmethod
    def forward(
        ctx: Any, group: MessageExchange, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Change nothing."""
        ctx.group = group
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Sum those gradients that are needed: of frozen parameters nothing is sent."""
        needed = ctx.needs_input_grad[1:]
        wanted = [g for g, need in zip(gradients, needed, strict=True) if need]
        flat = torch.cat([g.flatten() for g in wanted])
        total = ReduceFromGroup.apply(flat, ctx.group)
        sums = iter(total.split([g.numel() for g in wanted]))
        return None, *(
            next(sums).view_as(g) if need else None
            for g, need in zip(gradients, needed, strict=True)
        )


# ---- cut and join --------------------------------------------------------------------


def split_to_group(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Return this rank's part of `x` along `dim`; in backward, join the gradients.

    ValueError if the parts would not be equally long.
    """
    return SplitToGroup.apply(x, dim, exchange_of(group))


def gather_from_group(x: Tensor, dim: int, group: Group = None) -> Tensor:
    """Return all ranks' parts joined along `dim`; in backward, take the own part."""
    return GatherFromGroup.apply(x, dim, exchange_of(group))


class SplitToGroup(Function):
    """Every rank keeps its part of what all have. Nothing is sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: MessageExchange) -> Tensor:
        """Take the own part."""
        ctx.dim, ctx.group = dim, group
        return group.parts(x, dim)[group.rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Join the gradients of all parts."""
        return GatherFromGroup.apply(gradient, ctx.dim, ctx.group), None, None


class GatherFromGroup(Function):
    """All ranks get the whole of what each has a part of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: MessageExchange) -> Tensor:
        """All-gather."""
        ctx.dim, ctx.group = dim, group
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Take the own part of a gradient that all ranks have."""
        return SplitToGroup.apply(gradient, ctx.dim, ctx.group), None, None


# ---- the sequence-parallel pair ------------------------------------------------------


def gather_sequence(x: Tensor, group: Group = None, dim: int = 1) -> Tensor:
    """Return all ranks' parts joined along `dim`; in backward, sum and cut.

    (B, T/tp, C) -> (B, T, C). An all-gather; its backward is a reduce-scatter.
    """
    return GatherSequence.apply(x, dim, exchange_of(group))


def scatter_sequence(x: Tensor, group: Group = None, dim: int = 1) -> Tensor:
    """Return this rank's part, along `dim`, of the sum of all ranks' `x`.

    (B, T, C) -> (B, T/tp, C). A reduce-scatter; its backward is an all-gather. The two
    together send what one all-reduce does. ValueError if `dim` cannot be cut equally.
    """
    return ScatterSequence.apply(x, dim, exchange_of(group))


class GatherSequence(Function):
    """Parts are joined, and each rank goes on with the whole in its own way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: MessageExchange) -> Tensor:
        """All-gather."""
        ctx.dim, ctx.group = dim, group
        return group.all_gather(x, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sum all ranks' gradients, and take the own part."""
        return ScatterSequence.apply(gradient, ctx.dim, ctx.group), None, None


class ScatterSequence(Function):
    """Summands become a sum of which each rank has its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: MessageExchange) -> Tensor:
        """Reduce-scatter."""
        ctx.dim, ctx.group = dim, group
        return group.reduce_scatter(group.buffer(x.shape, x).copy_(x), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """All-gather: every rank's summand has the whole gradient."""
        return GatherSequence.apply(gradient, ctx.dim, ctx.group), None, None
