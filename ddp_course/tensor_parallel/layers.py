"""Column and row parallel: how several ranks share one matrix product.

A product Y = X W can be cut in two ways (in PyTorch, which computes X Wᵀ, the *rows* of
`weight` are the columns of W):

    column   W = [W_0, W_1]    rank r computes its columns of Y from the whole of X
    row      W = [W_0; W_1]    rank r computes a summand of Y from its columns of X

A column product followed by a row product needs one all-reduce in forward, after the
second: rank r's columns of the first result are those that its rows of the second
matrix need. In backward the gradient of X is a sum over all ranks: one more
all-reduce. So two operations are needed at the borders, each the other's backward:

                          forward          backward
    f   copy_to_group     nothing          all-reduce
    g   reduce_from_group all-reduce       nothing

Shoeybi et al. 2019, "Megatron-LM", section 3; megatron/core/tensor_parallel/
{mappings,layers}.py. `fused` computes the same faster. Chapter 09.
"""

from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from ddp_course.mechanisms.exchange import Group, MessageExchange, exchange_of
from ddp_course.model import MLP


def copy_to_group(x: Tensor, group: Group = None) -> Tensor:
    """Return `x`, which all ranks have; in backward, sum their gradients: f.

    Any shape. `group` is a process group, None for all ranks, or a `MessageExchange`.
    Without f training goes wrong silently: the layers before would learn from one
    rank's gradient alone.
    """
    return CopyToGroup.apply(x, exchange_of(group))


def reduce_from_group(x: Tensor, group: Group = None) -> Tensor:
    """Return the sum of all ranks' `x`; in backward, copy its gradient to each: g."""
    return ReduceFromGroup.apply(x, exchange_of(group))


class CopyToGroup(Function):
    """The copies of one tensor on N ranks: x -> (x, ..., x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MessageExchange) -> Tensor:
        """Return x unchanged."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum (g_0, ..., g_N-1) over the ranks: every rank's use of x counts."""
        return reduce_from_group(gradient, ctx.group), None


class ReduceFromGroup(Function):
    """The sum of N ranks' tensors: (x_0, ..., x_N-1) -> x_0 + ... + x_N-1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: MessageExchange) -> Tensor:
        """All-reduce x."""
        ctx.group = group
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the sum's gradient on every rank, since each rank has one summand."""
        return copy_to_group(gradient, ctx.group), None


class ParallelLayer(nn.Module):
    """A layer with this rank's slices of a full layer's parameters.

    `CUTS`: the dimension along which each parameter is cut; None if it stays whole.

    Args:
        full: the full layer, equal on all ranks; it is not changed.
        group: the ranks that share the layer, or an exchange between them.

    Raises ValueError if `full` is no layer, or cannot be cut into equal parts.
    """

    CUTS: ClassVar[MappingProxyType[str, int | None]] = MappingProxyType({})

    def __init__(self, full: nn.Module, group: Group = None) -> None:
        super().__init__()
        if not all(hasattr(full, name) for name in self.CUTS):
            raise ValueError(
                f"full is {full!r}; {type(self).__name__} takes the full layer, "
                f"with {' and '.join(self.CUTS)}"
            )
        self.group = exchange_of(group)
        for name in self.CUTS:
            parameter = getattr(full, name)
            if parameter is not None:  # a linear layer's bias may be missing
                own, dim = parameter.detach(), self.CUTS[name]
                if dim is not None:
                    own = self.group.parts(own, dim)[self.group.rank]
                own = own.clone(memory_format=torch.contiguous_format)
                parameter = nn.Parameter(own, parameter.requires_grad)
            self.register_parameter(name, parameter)


class ColumnParallelLinear(ParallelLayer):
    """This rank's columns of Y = X W + b: (..., I) -> (..., O/tp)."""

    CUTS = MappingProxyType({"weight": 0, "bias": 0})

    def forward(self, x: Tensor) -> Tensor:
        """Compute this rank's columns from the whole input."""
        return F.linear(copy_to_group(x, self.group), self.weight, self.bias)


class RowParallelLinear(ParallelLayer):
    """The sum Y = X W + b, from this rank's columns of X: (..., I/tp) -> (..., O)."""

    CUTS = MappingProxyType({"weight": 1, "bias": None})

    def forward(self, x: Tensor) -> Tensor:
        """Sum the products over the ranks, then add the bias once."""
        y = reduce_from_group(F.linear(x, self.weight), self.group)  # (..., O)
        return y if self.bias is None else y + self.bias


class ParallelMLP(nn.Module):
    """The MLP with columns of the first matrix and rows of the second on each rank.

    GELU works element by element, so this rank's columns are enough for it, and they
    are the inputs of this rank's rows of the second matrix. Chapter 09.
    """

    def __init__(self, full: MLP, group: Group = None) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(full.up, group)
        self.down = RowParallelLinear(full.down, group)

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the plain MLP does: (B, T, C) -> (B, T, C)."""
        return self.down(F.gelu(self.up(x)))
