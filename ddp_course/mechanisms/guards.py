"""Guards around PyTorch's own tools, which would be wrong in silence on sharded models.

PyTorch's tools know of one process. As soon as a strategy that shards parameters is
constructed, these tools are watched in this process:

    an optimizer that was made before     refused at its first step: what it steps has
                                          been left behind, and trains nothing
    torch.nn.utils.clip_grad_norm_,       refused: they take this rank's part for all
    get_total_norm, clip_grads_with_norm_
    torch.amp.GradScaler                  agrees: if a gradient is inf on one rank, all
                                          skip the step. (Otherwise that rank alone
                                          would skip it, and the replicas would differ.)

Optimizers that look at whole tensors, or at several, are refused by `trial`.
PyTorch has a hook for the steps of optimizers. The other tools have none, so a function
of each is wrapped in another. Chapters 05 and 07 to 10.
"""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import utils
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from ddp_course.mechanisms.placements import PLACED, device_of, groups_of, placed

# Parameters whose gradients are means in parts -> the optimizer that averages them.
AVERAGED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def leave_behind(parameters: Iterable[Tensor], by: str) -> None:
    """Note that `by` trains others in place of these parameters."""
    watch()
    for parameter in parameters:
        parameter.left_behind = by


def averaged_by(parameters: Iterable[Tensor], optimizer: Optimizer) -> None:
    """Note that `optimizer` averages these parameters' gradients, in parts."""
    watch()
    for parameter in parameters:
        AVERAGED[parameter] = weakref.ref(optimizer)


@functools.cache
def watch() -> None:
    """Watch what PyTorch does with parameters from now on; once is enough."""
    register_optimizer_step_pre_hook(_check_step)
    put_inside(utils.clip_grads_with_norm_, _clips_no_parts)
    put_inside(utils.get_total_norm, _norms_no_parts)
    _put_around(torch.amp.GradScaler, "_unscale_grads_", _agrees)


def _put_around(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    if inner := getattr(owner, name, None):  # another PyTorch may have another one
        setattr(owner, name, functools.wraps(inner)(make(inner)))


def put_inside(decorated: Any, make: Callable[[Any], Any]) -> None:
    """Wrap the function that `torch.nn.utils` has decorated with no_grad.

    It is wrapped inside the decorator, so that code that has imported the decorated
    function earlier calls the wrapper, too.
    """
    for cell in getattr(decorated, "__closure__", None) or ():
        if callable(inner := cell.cell_contents):
            cell.cell_contents = functools.wraps(inner)(make(inner))


def _check_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError for an optimizer whose parameters nobody trains any more."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    left = [p for p in stepped if hasattr(p, "left_behind")]
    # A plain model that tensor parallelism has taken its parts from may be trained on.
    if left and all(p.grad is None or not p.untyped_storage().size() for p in left):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before {left[0].left_behind}, "
            f"and {len(left)} of the parameters that it steps are none of the model's "
            "any more: make it afterwards, of what parameters() are then"
        )


def in_parts(parameter: Tensor) -> bool:
    """Tell whether this rank's gradient of it is a part, of the whole or of a mean."""
    way = placed(parameter)
    optimizer = AVERAGED.get(parameter)
    in_parts = optimizer is not None and optimizer() is not None
    return in_parts or (way is not None and way.divided)


def _clips_no_parts(clip: Callable[..., None]) -> Callable[..., None]:
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = _as_list(parameters)
        _refuse_parts(sum(map(in_parts, parameters)), len(parameters))
        clip(parameters, *args, **kwargs)

    return checked


def _norms_no_parts(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a norm of gradients so that it refuses parts, which it knows by their id."""

    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        tensors = _as_list(tensors)
        divided = filter(in_parts, [*AVERAGED, *PLACED.values()])
        parts = {id(p.grad) for p in divided if p.grad is not None}
        _refuse_parts(sum(id(tensor) in parts for tensor in tensors), len(tensors))
        return norm(tensors, *args, **kwargs)

    return checked


def _as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _refuse_parts(count: int, total: int) -> None:
    """Raise RuntimeError if some of the tensors are parts."""
    if count:
        raise RuntimeError(
            f"of {count} of these {total} parameters this rank has a part of the "
            "gradients, which torch.nn.utils takes for all: clip by clip_grad_norm_ of "
            "what has divided them, the parallel module or the optimizer"
        )


def _agrees(unscale: Callable[..., Any]) -> Callable[..., Any]:
    def agreed(scaler: Any, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        found = unscale(scaler, getattr(optimizer, "unscaled", optimizer), *args)
        own = sum(found.values(), torch.zeros(()))
        if (seen := seen_by_all(optimizer, own)) is not own:
            found[own.device] = seen
        return found

    return agreed


def seen_by_all(optimizer: Optimizer, own: Tensor | None) -> Tensor:
    """Return the largest `own` of all ranks that have parts of what is stepped.

    Called by all of them together, also by one that has found nothing: None is 0. If
    none has parts, all have the same gradients, and nothing is sent.
    """
    stepped = (p for group in optimizer.param_groups for p in group["params"])
    groups = getattr(optimizer, "groups", None) or groups_of(stepped)
    if not groups and own is not None:
        return own
    seen = torch.zeros(()) if own is None else own.clone()
    for group in groups:
        seen = seen.to(device_of(group))
        dist.all_reduce(seen, dist.ReduceOp.MAX, group)
    return seen if own is None else seen.to(own.device)
