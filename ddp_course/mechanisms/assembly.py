"""Put tensors together of which each rank has a part: add up what each rank owns.

Every number of a divided tensor has one owner (`placements`). So each rank writes the
numbers that it owns into zeros of the whole tensor's shape, and the sum over the ranks
is the whole tensor:

    rank 0   [1.5, 2.5,   0,   0]
    rank 1   [  0,   0, 3.5, 4.5]
    sum      [1.5, 2.5, 3.5, 4.5]

Bytes are added, as integers, so that all bits arrive as they were, also those of -0.0
and nan. It is done tensor by tensor: beside the parts and the result only one tensor
exists twice. A sharded checkpoint does the same with files in place of the sum
(`zero.sharded_checkpoint`). Chapter 08.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.launch.topology import device
from ddp_course.mechanisms.placements import Placed, Step, in_memory_order, placed

Group = dist.ProcessGroup
State = dict[str, Any]  # of one parameter: name -> value
Item = tuple[Placed, State]  # how a parameter was cut, and its state, cut likewise


def way_of(tensor: Tensor) -> Placed:
    """Return how a tensor was placed. Raises ValueError if it has not been."""
    if (way := placed(tensor)) is None:
        raise ValueError(
            f"a tensor of shape {[*tensor.shape]} is no part of this model; take its "
            "parameters()"
        )
    return way


def whole_of(part: Tensor, steps: Sequence[Step]) -> Tensor:
    """Return the tensor that was cut by these steps, with zeros around `part`."""
    for step in reversed(steps):
        part = step.around(part)
    return part


@dataclass(frozen=True)
class Form:
    """The form of a whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def form_of(value: Any, steps: Sequence[Step]) -> Form | None:
    """Return the form of the whole of `value`; None if it is not cut as its parameter.

    As the count "step", a state without dimensions, or one of another shape.
    """
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    if not steps:
        return Form(value.dtype, tuple(value.shape), tuple(value.stride()))
    if tuple(value.shape) != steps[-1].part_shape:
        return None
    return Form(value.dtype, steps[0].shape, steps[0].stride)


def assemble(
    own: Mapping[str, Item],
    groups: Sequence[Group],
    order: Iterable[str],
    everywhere: bool = False,
) -> dict[str, State]:
    """Return the whole states of all names in `order`, on the CPU.

    All ranks along the groups call it together. The first rank along all groups gets
    the result, the others an empty dict; with `everywhere` all ranks get it.

    Args:
        own: this rank's parts.
        groups: the groups along which they were divided.
        order: all names there can be, the same on all ranks.
        everywhere: whether all ranks want the result.
    """
    steps = {
        name: [step for step in way.steps if step.group in groups]
        for name, (way, _) in own.items()
    }
    known = _known(own, steps, groups)
    whole: dict[str, State] = {}
    for name in order:
        if name not in known:
            continue
        holder, entries = known[name]
        owned = name in own and _owns(steps[name], groups, holder)
        state: State = {}
        for key, entry in entries.items():
            state[key] = entry
            if isinstance(entry, Form):
                part = own[name][1].get(key) if owned else None
                zeros = torch.empty_strided(
                    entry.shape, entry.stride, dtype=entry.dtype, device=device()
                ).zero_()
                if part is not None:
                    zeros.copy_(whole_of(part.detach(), steps[name]))
                state[key] = _sum(zeros, groups, everywhere)
        whole[name] = state
    first = all(dist.get_rank(group) == 0 for group in groups)
    return whole if everywhere or first else {}


def _known(
    own: Mapping[str, Item], steps: Mapping[str, list[Step]], groups: Sequence[Group]
) -> dict[str, tuple[int, State]]:
    """Return, of each name, the first rank that has it, and what its state consists of.

    That is a `Form` for each tensor that is to be summed, and other values themselves.
    """
    known: dict[str, tuple[int, State]] = {}
    for name, (_, state) in own.items():
        entries = {key: form_of(v, steps[name]) or _copy(v) for key, v in state.items()}
        known[name] = dist.get_rank(), entries
    for group in groups:
        shown: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(shown, known, group)
        known = {}
        for name, (rank, entries) in (item for one in shown for item in one.items()):
            before, others = known.get(name, (rank, {}))
            both = {**entries, **others} if before <= rank else {**others, **entries}
            known[name] = min(before, rank), both
    return known


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _owns(steps: Sequence[Step], groups: Sequence[Group], holder: int) -> bool:
    """Tell whether this rank is the one to write its part.

    If nothing was noted, as of a buffer, the first rank that has the tensor writes it.
    """
    if not steps:
        return dist.get_rank() == holder
    noted = {step.group for step in steps}
    others = (group for group in groups if group not in noted)
    return all(s.owns for s in steps) and all(dist.get_rank(g) == 0 for g in others)


def _sum(zeros: Tensor, groups: Sequence[Group], everywhere: bool) -> Tensor | None:
    """Add up the bytes of all ranks' tensors; return the sum, or None if it left."""
    if zeros.numel():
        data = in_memory_order(zeros, zeros.stride()).view(torch.uint8)
        for group in reversed(groups):
            if everywhere:
                dist.all_reduce(data, group=group)
                continue
            dist.reduce(data, dist.get_global_rank(group, 0), group=group)
            if dist.get_rank(group) > 0:
                return None
    return zeros.cpu()
