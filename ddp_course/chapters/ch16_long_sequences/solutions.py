"""Solutions of the exercises of chapter 16."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ddp_course.context_parallel.online_softmax import merge


def my_merge(
    out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    """Weigh each output by its share in the sum of exponentials."""
    lse = torch.logaddexp(lse1, lse2)
    finite = torch.where(lse.isneginf(), 0, lse)  # e^(-inf - 0) is 0, and not nan
    share1, share2 = ((one - finite).exp()[..., None] for one in (lse1, lse2))
    return share1 * out1 + share2 * out2, lse


def my_zigzag(length: int, ranks: int) -> list[list[int]]:
    """Cut into twice as many chunks as ranks, and pair the first with the last."""
    size = -(-length // (2 * ranks))  # rounded up
    chunks = [
        list(range(k * size, min((k + 1) * size, length))) for k in range(2 * ranks)
    ]
    return [chunks[rank] + chunks[2 * ranks - 1 - rank] for rank in range(ranks)]


def my_ring(
    q: Tensor, k: Tensor, v: Tensor, ranks: int, attend: Callable, pass_on: Callable
) -> Tensor:
    """Pass on, compute, then wait; begin with an output that has seen no key."""
    out = torch.zeros_like(q)
    lse = torch.full_like(q[..., 0], -torch.inf)
    for step in range(ranks):
        last = step == ranks - 1
        handle = None if last else pass_on(k, v)
        out, lse = merge(out, lse, *attend(q, k, v))
        if not last:
            k, v = handle.wait()
    return out


def my_gradient_check(
    function: Callable[..., Tensor], tensors: Sequence[Tensor]
) -> list[bool]:
    """Compare the slope in a random direction with the slope that gradients predict."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    weights = torch.rand_like(function(*inputs)) + 0.5
    (function(*inputs) * weights).sum().backward()
    verdicts = []
    for k, x in enumerate(inputs):
        direction = torch.randn_like(x)
        values = []
        for step in (1e-5, -1e-5):
            moved = list(tensors)
            moved[k] = tensors[k] + step * direction
            values.append((function(*moved) * weights).sum())
        slope = (values[0] - values[1]) / 2e-5
        expected = 0.0 if x.grad is None else (x.grad * direction).sum()
        verdicts.append(bool(abs(slope - expected) < 1e-7 * (1 + abs(slope))))
    return verdicts
