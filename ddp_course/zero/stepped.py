"""Can this optimizer step pieces? Asked at its first step; a part of stage 3.

An optimizer is constructed after the model was sharded, and of any class. PyTorch has
one hook for the steps of all optimizers; there each is tried out once
(`mechanisms.elementwise`), on every rank alike, before it changes a piece. Chapter 08.
"""

import functools
import inspect
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_course.mechanisms.elementwise import check_elementwise

REMEDY = (
    "Take one that steps each element alone (SGD, AdamW, ...), or "
    "DistributedDataParallel, which leaves tensors whole"
)
tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()


class Stepped:
    """Refuse optimizers that look at whole tensors, groups by shape, and lost passes.

    Attributes:
        waits: a forward was recorded, and no backward has come since.
    """

    waits = False

    def constructed(self, fsdp: Any) -> None:
        """Mark the pieces, and watch the steps of all optimizers."""
        _watch()
        for piece in fsdp.pieces.values():
            piece.stepped = weakref.ref(self)

    def after_forward(self, fsdp: Any) -> None:
        """Note that a backward should come."""
        self.waits = torch.is_grad_enabled()

    def before_backward(self, fsdp: Any) -> None:
        """Note that it has come."""
        self.waits = False


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise an error for an optimizer that would step pieces wrongly."""
    groups = optimizer.param_groups
    pieces = [p for group in groups for p in group["params"] if hasattr(p, "stepped")]
    if not pieces:
        return
    part = pieces[0].stepped()
    if part and part.waits and all(piece.grad is None for piece in pieces):
        raise RuntimeError(
            "no parameter has a gradient, though a forward was recorded: no backward "
            "has come to the sharded module. backward(inputs=...) and autograd.grad "
            "do not reach parameters(), which are pieces: call loss.backward()"
        )
    if optimizer in tried:
        return
    if not all(group["params"] for group in groups):
        raise RuntimeError(
            "a parameter group of this optimizer is empty. Pieces of parameters are "
            "vectors: p.dim() is 1 for each, so choose groups by name, or by the shape "
            "that the plain module's parameters had"
        )
    for group in groups:
        _try_out(type(optimizer), group, optimizer.defaults)
    tried.add(optimizer)


def _try_out(kind: type[Optimizer], group: dict, defaults: dict[str, Any]) -> None:
    """Raise NotElementwiseError if the class does other steps with parts of tensors."""
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    known = inspect.signature(kind.__init__).parameters
    taken = {name: value for name, value in defaults.items() if name in known}
    device = group["params"][0].device
    try:
        kind([{**options, "params": [nn.Parameter(torch.zeros(1))]}], **taken)
    except Exception:  # it takes other arguments: it cannot be tried out
        return
    check_elementwise(kind, options, taken, device, REMEDY)
