"""Modules in which backward fails, takes any order, or does not reach everything."""

import torch
from torch import nn


class Fails(torch.autograd.Function):
    """Gives its input on; fails in the middle of backward, unless not `wanted`."""

    wanted = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.wanted:
            raise ArithmeticError("in the middle of backward")
        return gradient


class InAnyOrder(nn.Module):
    """Equal branches; the order of forward decides that of the gradients."""

    def __init__(self, branches: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(
            nn.Linear(2, 2, bias=False) for _ in range(branches)
        )

    def forward(self, x, order):
        outputs = {k: (k + 1) * self.branches[k](x) for k in order}
        return sum(outputs[k] for k in sorted(order))


class Branches(nn.Module):
    """Three branches, of which `which` are used, in that order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.first = nn.Linear(3, 3)

    def forward(self, x, which):
        h = self.first(x)
        return [self.branches[k](h) for k in which]
