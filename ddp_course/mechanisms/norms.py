"""The norm of the whole model's gradient, from what each rank has of it.

Placements say which rank owns which numbers, so each is counted once. Chapter 07.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ddp_course.launch.topology import device
from ddp_course.mechanisms.placements import groups_of, placed


def total_norm(
    tensors: Iterable[Tensor], groups: Iterable[dist.ProcessGroup] | None = None
) -> Tensor:
    """Return the norm of the whole model's gradient, in float64; for all ranks.

    The norm of all gradients is not the sum of the parts' norms, but their squares can
    be added: first of the gradients that this rank owns, then over the ranks along each
    group.

    Args:
        tensors: this rank's parts, each with a `grad` or None.
        groups: the groups that divide the model; None: those of the tensors. Pass them
            where a rank may have no tensor.

    As torch.nn.utils.get_total_norm.
    """
    tensors = list(tensors)
    groups = groups_of(tensors) if groups is None else groups
    own = [t for t in tensors if (way := placed(t)) is None or way.owned]
    grads = (t.grad for t in own if t.grad is not None)
    norm = get_total_norm([grad for grad in grads if grad.numel()])
    square = norm.to(device(), torch.float64) ** 2
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


@torch.no_grad()
def clip_grad_norm_(
    tensors: Iterable[Tensor],
    max_norm: float,
    groups: Iterable[dist.ProcessGroup] | None = None,
) -> Tensor:
    """Scale all gradients so that the whole model's norm is at most `max_norm`.

    Returns the norm as it was before; called by all ranks along the groups, with the
    arguments of `total_norm`. As torch.nn.utils.clip_grad_norm_, which takes each
    rank's part for the whole. Chapter 07.
    """
    tensors = list(tensors)
    norm = total_norm(tensors, groups)
    clip_grads_with_norm_(tensors, max_norm, norm)
    return norm.float()
