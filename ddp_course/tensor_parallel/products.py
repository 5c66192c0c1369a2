"""The two products of a parallel layer, each with its communication in one operation.

They compute what these do, which is how to read them:

    column_product   F.linear(copy_to_group(x), weight, bias)
                     F.linear(gather_sequence(x), weight, bias)
    row_product      reduce_from_group(F.linear(x, weight)) + bias
                     scatter_sequence(F.linear(x, weight)) + copy_to_group(bias)

In one operation, a summand is computed where it is sent from, and not copied there; and
while the gradient of the input is summed over the ranks, a column product computes
those of weight and bias, for which no other rank waits.

LinearWithGradAccumulationAndAsyncCommunication in Megatron-LM's
megatron/core/tensor_parallel/layers.py. Chapter 09.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ddp_course.mechanisms.exchange import Group, MessageExchange, exchange_of


def column_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return this rank's columns of X W + b: (..., I) -> (..., O/tp).

    `weight` is (O/tp, I). With `sequence_parallel`, `x` is this rank's part of the
    sequence, (B, T/tp, I), and the result is of all of it, (B, T, O/tp).
    """
    x, weight, bias = _cast(x, weight, bias)
    return ColumnProduct.apply(x, weight, bias, exchange_of(group), sequence_parallel)


def row_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    group: Group = None,
    *,
    sequence_parallel: bool = False,
) -> Tensor:
    """Return X W + b, summed over the ranks' columns of X: (..., I/tp) -> (..., O).

    `weight` is (O, I/tp); `bias`, (O,), is added once. With `sequence_parallel` the
    result is this rank's part of the sequence: (B, T, I/tp) -> (B, T/tp, O).
    """
    x, weight, bias = _cast(x, weight, bias)
    return RowProduct.apply(x, weight, bias, exchange_of(group), sequence_parallel)


class ColumnProduct(Function):
    """Y = X W + b, of which this rank has the columns."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: MessageExchange,
        sequence_parallel: bool,
    ) -> Tensor:
        """Join the sequence, if it is cut; multiply."""
        x = group.all_gather(x, 1) if sequence_parallel else x  # (..., I)
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return F.linear(x, weight, bias)  # (..., O/tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the gradient of X over the ranks; meanwhile compute those of W and b."""
        x, weight = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[:3]
        flat = _rows(gradient)  # (R, O/tp)
        own: list[Tensor | None] = []

        def meanwhile() -> None:
            own.append(flat.t() @ _rows(x) if needs[0] else None)
            own.append(flat.sum(0) if needs[1] else None)

        if not needs_x:
            meanwhile()
            return None, *own, None, None
        summand = ctx.group.buffer(x.shape, gradient)
        torch.mm(flat, weight, out=summand.view(-1, x.shape[-1]))
        if ctx.sequence_parallel:
            meanwhile()
            total = ctx.group.reduce_scatter(summand, 1)  # (B, T/tp, I)
        else:
            total = ctx.group.all_reduce(summand, meanwhile=meanwhile)  # (..., I)
        return total, *own, None, None


class RowProduct(Function):
    """Y = X W + b, of which this rank computes a summand from its columns of X."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: MessageExchange,
        sequence_parallel: bool,
    ) -> Tensor:
        """Multiply, sum over the ranks, add the bias."""
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        summand = group.buffer((*x.shape[:-1], weight.shape[0]), x)
        flat = summand.view(-1, weight.shape[0])
        torch.mm(_rows(x), weight.t(), out=flat)
        if sequence_parallel:
            y = group.reduce_scatter(summand, 1)  # (B, T/tp, O)
        else:
            y = group.all_reduce(summand)  # (..., O)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """All ranks have the gradient of the sum: it is that of each summand."""
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_bias = _rows(gradient).sum(0) if needs_bias else None
        if ctx.sequence_parallel:
            if needs_bias:  # each rank has added it to its own positions only
                buffer = ctx.group.buffer(of_bias.shape, of_bias)
                of_bias = ctx.group.all_reduce(buffer.copy_(of_bias))
            gradient = ctx.group.all_gather(gradient, 1)  # (B, T, O)
        flat = _rows(gradient)  # (R, O)
        of_x = (flat @ weight).view_as(x) if needs_x else None
        of_weight = flat.t() @ _rows(x) if needs_weight else None
        return of_x, of_weight, of_bias, None, None


def _rows(x: Tensor) -> Tensor:
    """See `x` as a matrix: (..., I) -> (R, I)."""
    return x.reshape(-1, x.shape[-1])


def _cast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast would before a product, if it is on."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
