"""A training run in which the number of ranks grows fourfold halfway. Chapter 19."""

from __future__ import annotations

import torch
from torch import nn

ROWS, BATCH, LR = 1024, 8, 0.005
Curve = list[tuple[int, float]]  # rows used so far, loss over all rows


def grown(times_batch: int, times_lr: int) -> Curve:
    """Train on each row once; multiply batch and learning rate in the second half.

    One process computes what the ranks would: they average the gradients of a batch,
    however its rows are divided among them.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 16, generator=generator, dtype=torch.float64)
    noise = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
    y = x.sum(dim=1, keepdim=True) + noise
    weight = torch.zeros(16, 1, dtype=torch.float64, requires_grad=True)
    curve, used = [], 0
    while used < ROWS:
        late = used >= ROWS // 2
        batch = slice(used, used + BATCH * (times_batch if late else 1))
        loss = nn.functional.mse_loss(x[batch] @ weight, y[batch])
        (gradient,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= LR * (times_lr if late else 1) * gradient
            used = batch.stop
            curve.append((used, nn.functional.mse_loss(x @ weight, y).item()))
    return curve
