"""The norm of gradients that lie on many ranks: each element counts once, on its owner.

A norm of all is not the sum of the parts' norms, and clipping each part by its own
would turn the gradient into another direction. The squares can be added. Chapter 07.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm


def total_norm(
    owned: Iterable[Tensor],
    device: torch.device,
    norm_type: float = 2.0,
    group: dist.ProcessGroup | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Return the norm of all ranks' gradients together, in float64; for all ranks.

    Args:
        owned: what this rank owns, each with a `grad` or None; it may be nothing.
        device: where the ranks add up.
        norm_type: p of the p-norm, above 0; inf is the largest magnitude.
        group: the ranks.
        error_if_nonfinite: raise RuntimeError, on all ranks, if it is inf or nan.

    Raises ValueError for another `norm_type`. As torch.nn.utils.get_total_norm.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type is {norm_type!r}; it must be above 0, or inf")
    gradients = [tensor.grad for tensor in owned if tensor.grad is not None]
    norm = get_total_norm(gradients, p).to(device, torch.float64)
    if p == math.inf:
        dist.all_reduce(norm, dist.ReduceOp.MAX, group)
    else:
        norm **= p
        dist.all_reduce(norm, dist.ReduceOp.SUM, group)
        norm **= 1 / p
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}, so they cannot be clipped; "
            "with error_if_nonfinite=False they would be scaled all the same"
        )
    return norm
