"""Divide tensors that a subgroup of the same ranks has divided before.

Expert parallelism cuts experts along ep, which is a part of data parallelism; ZeRO then
cuts each rank's experts along the other part. Both together are one division among all
ranks of data parallelism: a flat piece of a rank's experts is a flat piece of all
experts, too, because experts are stacked along the first dimension. Then norms and
states are assembled along that one group, as for any other parameter. Chapter 17.
"""

from collections.abc import Iterable
from math import prod

import torch.distributed as dist
from torch import Tensor

from ddp_course.mechanisms.placements import (
    PLACED,
    Flat,
    Placed,
    Replicate,
    Shard,
    Step,
    place,
    placed,
)


def is_within(group: dist.ProcessGroup, other: dist.ProcessGroup) -> bool:
    """Return whether all ranks of `group` are in `other`."""
    ranks = dist.get_process_group_ranks
    return {*ranks(group)} <= {*ranks(other)}


def groups_around(
    group: dist.ProcessGroup, before: Iterable[dist.ProcessGroup]
) -> list[dist.ProcessGroup]:
    """Return `before` and `group`, without the groups that lie within `group`."""
    return [*(each for each in before if not is_within(each, group)), group]


def flat_in_whole(step: Step, piece: Flat) -> Flat:
    """Return where a flat piece of this rank's part is in the undivided tensor."""
    if isinstance(step.placement, Replicate):
        return piece
    if step.placement != Shard(0) or step.shape[0] % step.size:
        raise ValueError(f"a flat piece of {step} is not flat in the whole tensor")
    before = step.rank * prod(step.shape) // step.size
    return Flat(before + piece.first, before + piece.last)


def place_piece(
    piece: Tensor, group: dist.ProcessGroup, flat: Flat, like: Tensor, name: str
) -> None:
    """Record how a piece was cut along `group` from a parameter, `like`.

    If `like` was divided along a part of the group before, both divisions become one.
    """
    place(piece, group, flat, like=like, name=name)
    before = placed(like)
    for step in () if before is None else before.steps:
        if is_within(step.group, group):
            outside = [one for one in before.steps if one is not step]
            own = dist.get_rank(group), dist.get_world_size(group)
            whole = flat_in_whole(step, flat)
            joined = Step(whole, *own, step.shape, step.stride, group)
            piece.placed = Placed(before.name, before.shape, (*outside, joined))
            PLACED[id(piece)] = piece
