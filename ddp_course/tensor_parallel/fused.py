"""Column and row parallel once more: a product and its communication in one operation.

The two classes compute what those of `layers` do, and with `sequence_parallel` this:

    column    F.linear(gather_sequence(x), weight, bias)
    row       scatter_sequence(F.linear(x, weight)) + copy_to_group(bias)

One operation writes a summand directly into the buffer that is sent, without a copy.
And while an all-reduce sums the gradient of the input, a column product computes those
of weight and bias, for which no other rank waits. (A pipeline may postpone these two
even further: `weight_grads`.)

LinearWithGradAccumulationAndAsyncCommunication in Megatron-LM's
megatron/core/tensor_parallel/layers.py. Chapter 09.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ddp_course.mechanisms.exchange import Group
from ddp_course.tensor_parallel.layers import (
    ColumnParallelLinear,
    ParallelLayer,
    RowParallelLinear,
)
from ddp_course.tensor_parallel.ops import OwnTokensLayer


class FusedLinear(ParallelLayer):
    """The base of the column and the row layer.

    Args:
        full: the `nn.Linear`.
        group: the ranks that share it.
        sequence_parallel: whether the sequence is cut before and after the layers.
    """

    def __init__(
        self, full: nn.Linear, group: Group = None, *, sequence_parallel: bool = False
    ) -> None:
        super().__init__(full, group)
        self.sequence_parallel = sequence_parallel
        self.weight_grads: Any = None  # a WeightGradStore, if a pipeline sets one

    def product(
        self, function: type[Function], x: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Return the product; if autocast is on, cast its inputs as autocast would."""
        tensors, none = (x, self.weight, bias), self.weight[:0]
        dtype = (none @ none.t()).dtype  # a product's type, which autocast may change
        tensors = (t if t is None else t.to(dtype) for t in tensors)
        return function.apply(*tensors, self)

    def own_gradients(
        self, ctx: Any, rows: Tensor, x: Tensor
    ) -> Sequence[Tensor | None]:
        """Return the gradients of weight and bias; Nones if they are postponed.

        `rows` is the gradient of the product.
        """
        _, needs_weight, needs_bias = ctx.needs_input_grad[:3]

        def gradients() -> Sequence[Tensor | None]:
            weight = rows.t() @ _rows(x) if needs_weight else None
            return [weight, rows.sum(0) if needs_bias else None]

        store = self.weight_grads
        return store.compute(ctx.own, gradients) if store else gradients()


class FusedColumnParallelLinear(FusedLinear, ColumnParallelLinear):
    """This rank's columns of Y: (..., I) or (B, T/tp, I) -> (..., O/tp)."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's columns from the whole input."""
        return self.product(ColumnProduct, x, self.bias)


class FusedRowParallelLinear(FusedLinear, OwnTokensLayer, RowParallelLinear):
    """The sum of all ranks' products: (..., I/tp) -> (..., O) or (B, T/tp, O)."""

    def whole_parameters(self) -> list[Tensor]:
        """Return the bias, if there is one and each rank adds it to its own tokens."""
        return [self.bias] if self.sequence_parallel and self.bias is not None else []

    def forward(self, x: Tensor) -> Tensor:
        """Sum the products over the ranks, then add the bias once."""
        if not self.whole_parameters():
            return self.product(RowProduct, x, self.bias)
        y = self.product(RowProduct, x, None)  # (B, T/tp, O)
        (bias,) = self.summed()
        return y + bias.to(y.dtype)


class ColumnProduct(Function):
    """A product with its own backward: this rank's columns of Y = X W + b."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FusedLinear
    ) -> Tensor:
        """Gather the sequence, if it is cut, and multiply it by the weight."""
        x = layer.group.all_gather(x, 1) if layer.sequence_parallel else x  # (..., I)
        ctx.save_for_backward(x, weight)
        ctx.own, ctx.layer = (weight, bias), layer
        return F.linear(x, weight, bias)  # (..., O/tp)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute all gradients; an all-reduce of X's overlaps with W's and b's."""
        x, weight = ctx.saved_tensors
        layer, group, rows = ctx.layer, ctx.layer.group, _rows(gradient)  # (R, O/tp)
        own: list[Tensor | None] = []

        def compute_own() -> None:
            own.extend(layer.own_gradients(ctx, rows, x))

        if not ctx.needs_input_grad[0]:
            compute_own()
            return None, *own, None
        summand = group.buffer(x.shape, gradient)
        torch.mm(rows, weight, out=_rows(summand))
        if layer.sequence_parallel:
            compute_own()
            total = group.reduce_scatter(summand, 1)  # (B, T/tp, I)
        else:
            total = group.all_reduce(summand, compute=compute_own)  # (..., I)
        return total, *own, None


class RowProduct(Function):
    """The sum Y = X W + b of all ranks' products, each with its columns of X."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FusedLinear
    ) -> Tensor:
        """Multiply, sum over the ranks, add the bias."""
        ctx.save_for_backward(x, weight)
        ctx.own, ctx.layer = (weight, bias), layer
        summand = layer.group.buffer((*x.shape[:-1], weight.shape[0]), x)
        torch.mm(_rows(x), weight.t(), out=_rows(summand))
        if layer.sequence_parallel:
            y = layer.group.reduce_scatter(summand, 1)  # (B, T/tp, O)
        else:
            y = layer.group.all_reduce(summand)  # (..., O)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Compute all gradients from the sum's, which is also each summand's."""
        x, weight = ctx.saved_tensors
        layer = ctx.layer
        if layer.sequence_parallel:
            gradient = layer.group.all_gather(gradient, 1)  # (B, T, O)
        rows = _rows(gradient)  # (R, O)
        grad_x = (rows @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        return grad_x, *layer.own_gradients(ctx, rows, x), None


def _rows(x: Tensor) -> Tensor:
    """Flatten `x` to a matrix: (..., I) -> (R, I)."""
    return x.reshape(-1, x.shape[-1])
