"""Solutions to the exercises of chapter 12."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


def from_bits(sign: str, exponent: str, fraction: str) -> float:
    """Read exponent and fraction as whole numbers; treat both extreme exponents."""
    e, f = int(exponent, 2), int(fraction, 2) / 2 ** len(fraction)
    bias = 2 ** (len(exponent) - 1) - 1
    if "0" not in exponent:
        size = math.nan if f else math.inf
    else:
        size = (1 + f) * 2.0 ** (e - bias) if e else f * 2.0 ** (1 - bias)
    return -size if sign == "1" else size


def master_step(parameters: list[Tensor], masters: list[Tensor], lr: float) -> None:
    """Step the copies in 32 bits; write them, rounded, into the parameters."""
    for parameter, master in zip(parameters, masters, strict=True):
        if parameter.grad is not None:
            master -= lr * parameter.grad.to(master.dtype)
            parameter.data.copy_(master)


def next_scale(
    scale: float, clean: int, found: bool, interval: int
) -> tuple[float, int]:
    """Halve the scale after an inf; double it after enough clean steps in a row."""
    if found:
        return scale / 2, 0
    if clean + 1 == interval:
        return scale * 2, 0
    return scale, clean + 1


def agreed_step(
    weights: list[Tensor],
    gradients: list[Tensor],
    scale: float,
    max_norm: float,
    lr: float,
) -> bool:
    """Unscale, clip and step, unless the all-reduced sum of squares is inf or nan."""
    squares = torch.zeros(1, dtype=torch.float64)
    gradients = [gradient / scale for gradient in gradients]
    for gradient in gradients:
        squares += gradient.double().square().sum()
    dist.all_reduce(squares)  # so all ranks see one rank's inf or nan
    norm = float(squares.sqrt())
    if not math.isfinite(norm):
        return False
    factor = min(1.0, max_norm / norm) if norm else 1.0
    for weight, gradient in zip(weights, gradients, strict=True):
        weight -= lr * factor * gradient
    return True
