"""A matrix cut over ranks, with nothing but PyTorch's collectives.

    by column   Y = X [W_0, W_1]                    gather the columns of Y
    by row      Y = [X_0, X_1] [W_0; W_1]           add up the summands of Y

Both layers take the whole input and return the whole output, on every rank. `layers`
omits the messages that two such layers in a row do not need. (PyTorch's `weight` is Wᵀ:
its rows are the columns of W.) Chapter 09.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

Group = dist.ProcessGroup | None  # None: all ranks


class SumGradients(Function):
    """An identity with a backward that adds up the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Return x unchanged."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """All-reduce the gradient."""
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class GatherColumns(Function):
    """A gather of the ranks' columns, with a backward that selects this rank's."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        """All-gather the columns."""
        ctx.group, n = group, dist.get_world_size(group)
        columns = [torch.empty_like(y) for _ in range(n)]
        dist.all_gather(columns, y.contiguous(), group=group)
        return torch.cat(columns, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Cut the gradient, and return this rank's columns."""
        n, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return gradient.chunk(n, dim=-1)[rank], None


class SumOutputs(Function):
    """A sum of the ranks' y; in backward, each rank has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        """All-reduce y."""
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient unchanged."""
        return gradient, None


class NaiveColumnLinear(nn.Module):
    """This rank's columns of W: (..., I) -> (..., O), gathered."""

    def __init__(self, full: nn.Module, group: Group = None) -> None:
        super().__init__()
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(full.weight.detach().chunk(n)[rank].clone())
        self.bias = nn.Parameter(full.bias.detach().chunk(n)[rank].clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `x` by this rank's columns, and gather all ranks' columns."""
        y = F.linear(SumGradients.apply(x, self.group), self.weight, self.bias)
        return GatherColumns.apply(y, self.group)


class NaiveRowLinear(nn.Module):
    """This rank's rows of W, and the columns of x for them: (..., I) -> (..., O).

    The bias is whole on every rank, and added once, after the sum.
    """

    def __init__(self, full: nn.Module, group: Group = None) -> None:
        super().__init__()
        n, rank = dist.get_world_size(group), dist.get_rank(group)
        self.weight = nn.Parameter(full.weight.detach().chunk(n, dim=1)[rank].clone())
        self.bias = nn.Parameter(full.bias.detach().clone())
        self.group, self.n, self.rank = group, n, rank

    def forward(self, x: Tensor) -> Tensor:
        """Multiply this rank's part of `x` by its rows, and sum over the ranks."""
        own = SumGradients.apply(x, self.group).chunk(self.n, dim=-1)[self.rank]
        return SumOutputs.apply(F.linear(own, self.weight), self.group) + self.bias


class NaiveParallelMLP(nn.Module):
    """The MLP with both matrices cut by column, and both results gathered.

    Every rank computes 1/N of both products. But the first result is 4C wide, and is
    gathered only to be multiplied by columns again; its gradient is as wide.
    """

    def __init__(self, full: nn.Module, group: Group = None) -> None:
        super().__init__()
        self.up = NaiveColumnLinear(full.up, group)
        self.down = NaiveColumnLinear(full.down, group)

    def forward(self, x: Tensor) -> Tensor:
        """Compute what the plain MLP does: (B, T, C) -> (B, T, C)."""
        return self.down(F.gelu(self.up(x)))
