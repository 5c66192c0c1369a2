"""Solutions of the exercises of chapter 09."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def copy_to_ranks(x: Tensor, all_reduce: Callable[[Tensor], None]) -> Tensor:
    """Return `x`; in backward, sum the gradients of all ranks."""

    class Copy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            total = gradient.clone()  # autograd may pass the same tensor elsewhere
            all_reduce(total)
            return total

    return Copy.apply(x)


def row_linear(
    x: Tensor, weight: Tensor, bias: Tensor, reduce_sum: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the whole X @ W.T + bias from this rank's columns of X and of W."""
    return reduce_sum(F.linear(x, weight)) + bias  # the bias once, after the sum


def vocab_loss(
    logits: Tensor, targets: Tensor, all_reduce: Callable[[Tensor, str], None]
) -> tuple[float, Tensor]:
    """Return the mean loss over all tokens, and its gradient for these logits."""
    tokens, words = logits.shape
    highest = logits.max(dim=1).values
    all_reduce(highest, "max")
    exponentials = (logits - highest[:, None]).exp()
    place = targets - words * dist.get_rank()  # index in this rank's part, if inside
    mine = (place >= 0) & (place < words)
    row, column = torch.arange(tokens)[mine], place[mine]
    # row 0: sums of exponentials; row 1: the target's logit, on the rank that has it
    sums = logits.new_zeros(2, tokens)
    sums[0] = exponentials.sum(dim=1)
    sums[1, mine] = logits[row, column] - highest[mine]
    all_reduce(sums, "sum")
    gradient = exponentials / sums[0, :, None]  # the softmax
    gradient[row, column] -= 1
    return (sums[0].log() - sums[1]).mean().item(), gradient / tokens
