"""Try out optimizers before they step a model that is divided over ranks.

A rank that has only a part of a matrix cannot compute the matrix's norm, the means of
its rows or its singular vectors. A rank that has some of the layers cannot compute a
norm over all of them. PyTorch's DTensor asks the other ranks; here a part is a plain
tensor, and its optimizer may be of any class. PyTorch has one hook for the steps of all
optimizers. In it, each optimizer is tried out once on small tensors (`elementwise`), on
every rank alike, before it changes a part. Chapters 08 to 10.
"""

import functools
import inspect
import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_course.mechanisms.elementwise import check_elementwise
from ddp_course.mechanisms.placements import PLACED, Flat, Placed, Shard, placed

REMEDY = (
    "Take one that steps each element alone (SGD, AdamW, ...), or "
    "DistributedDataParallel, which leaves tensors whole"
)
tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@functools.cache
def watch() -> None:
    """Try out the optimizers of all divided models in this process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise NotElementwiseError if the optimizer would step this rank's part wrongly.

    Any optimizer may step tensors that every rank has as a whole.
    """
    if not PLACED or optimizer in tried:
        return
    for group in optimizer.param_groups:
        ways = [way for p in group["params"] if (way := placed(p)) and way.divided]
        if ways:
            _try_out(optimizer, group, whole_tensors=not any(map(_is_cut, ways)))
            tried.add(optimizer)


def _is_cut(way: Placed) -> bool:
    """Return whether this rank has only a part of the tensor (not in a pipeline)."""
    several = (step.placement for step in way.steps if step.size > 1)
    return any(isinstance(placement, (Shard, Flat)) for placement in several)


def _try_out(optimizer: Optimizer, group: dict[str, Any], whole_tensors: bool) -> None:
    """Try out the optimizer's class with a group's options; warn if that fails."""
    kind, device = type(optimizer), group["params"][0].device
    options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
    known = inspect.signature(kind.__init__).parameters
    taken = {name: v for name, v in optimizer.defaults.items() if name in known}
    try:
        kind([{**options, "params": [nn.Parameter(torch.zeros(1, 1))]}], **taken)
    except Exception as error:  # the class needs other arguments
        if not kind.__module__.startswith("ddp_course."):  # these check themselves
            warnings.warn(
                f"{kind.__name__} could not be tried out: {error!r}. This rank has a "
                "part of the model: make sure that it steps each element alone",
                stacklevel=2,
            )
        return
    check_elementwise(kind, options, taken, device, REMEDY, whole_tensors)
