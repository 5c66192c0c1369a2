"""The norm of gradients of which some are cut: each number of the model counts once.

A rank has parts of some gradients and all of others. Were it to clip by what it has,
every rank would scale by another factor, and what is the same on all ranks would be so
no longer. The squares can be added: those of the parts over the ranks, and then those
of what all have, once. Chapter 09.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ddp_course.collectives import ReduceOp

if TYPE_CHECKING:
    from ddp_course.tensor_parallel.gpt import TensorParallelGPT


@torch.no_grad()
def total_norm(model: TensorParallelGPT, norm_type: float = 2.0) -> Tensor:
    """Return the norm of the whole model's gradient, in float64, on all ranks.

    `norm_type` is the p of the p-norm, above 0; inf is the largest magnitude. Raises
    ValueError for another one. As torch.nn.utils.get_total_norm.
    """
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type is {norm_type!r}; it must be above 0, or inf")
    dims = {cut.name: cut.dim for cut in model.layout}
    gradients = {n: q.grad for n, q in model.named_parameters() if q.grad is not None}
    cut = [g for name, g in gradients.items() if dims[name] is not None]
    common = [g for name, g in gradients.items() if dims[name] is None]
    device = next(model.parameters()).device
    own, once = (
        get_total_norm(gs, p).to(device, torch.float64) for gs in (cut, common)
    )
    buffer = model.exchange.buffer((1,), own)
    if p == math.inf:
        others = model.exchange.all_reduce(buffer.copy_(own), ReduceOp.MAX)
        return torch.maximum(others[0], once)
    return (model.exchange.all_reduce(buffer.copy_(own**p))[0] + once**p) ** (1 / p)


@torch.no_grad()
def clip_grad_norm_(
    model: TensorParallelGPT, max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return the norm."""
    norm = total_norm(model, norm_type)
    clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm.float()
