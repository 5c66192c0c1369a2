"""Guards around PyTorch's own tools, which would silently be wrong on sharded models.

PyTorch's tools assume one process. `mechanisms/__init__.py` guards these tools in every
process that imports a strategy. Where no strategy has divided a parameter, averages
parts of its gradient (`placements` has these notes), or gives its optimizer `groups` of
ranks, the tools work as before. Guarded:

    an optimizer constructed earlier      refused at its first step: the model no longer
                                          uses the parameters that it steps
    torch.nn.utils.clip_grad_norm_,       refused: they would take this rank's part of
    get_total_norm, clip_grads_with_norm_ the gradient for the whole
    torch.amp.GradScaler                  if a gradient is inf on one rank, all ranks
                                          skip the step. (Otherwise only that rank
                                          would, and the replicas would differ.)
    torch.nn.utils.clip_grad_value_,      refused with ZeRO 2 if there is no gradient:
    get_total_norm                        they are in the optimizer's shards

`trial` refuses optimizers that use whole tensors, or several at once. PyTorch has a
hook for the steps of optimizers. The other tools have none, so the guards wrap a
function of each. Chapters 05 and 07 to 10.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import utils
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_course.mechanisms.placements import (
    AVERAGED,
    PLACED,
    device_of,
    groups_of,
    placed,
)


@functools.cache
def watch() -> None:
    """Install the guards in this process, once."""
    register_optimizer_step_pre_hook(_check_step)
    put_inside(utils.clip_grads_with_norm_, _clip_refusing_parts)
    put_inside(utils.get_total_norm, _norm_refusing_parts)
    put_inside(utils.get_total_norm, _refusing_nothing(lambda gradient: gradient))
    put_inside(utils.clip_grad_value_, _refusing_nothing(lambda p: p.grad))
    _put_around(torch.amp.GradScaler, "_unscale_grads_", _unscale_agreed)


def _put_around(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    if inner := getattr(owner, name, None):  # other versions of PyTorch may lack it
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
    """Raise RuntimeError if the model no longer uses the optimizer's parameters."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    left = [p for p in stepped if hasattr(p, "left_behind")]
    # Tensor parallelism copies its parts: the plain model may be trained further.
    if left and all(p.grad is None or not p.untyped_storage().size() for p in left):
        raise RuntimeError(
            f"this {type(optimizer).__name__} was made before {left[0].left_behind}, "
            f"and {len(left)} of the parameters that it steps no longer belong to the "
            "model: construct the optimizer afterwards, with the new parameters()"
        )


def is_partial(parameter: Tensor) -> bool:
    """Return whether this rank has only a part of the parameter's averaged gradient."""
    way = placed(parameter)
    optimizer = AVERAGED.get(parameter)
    part_averaged = optimizer is not None and optimizer() is not None
    return part_averaged or (way is not None and way.divided)


def _clip_refusing_parts(clip: Callable[..., None]) -> Callable[..., None]:
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = _as_list(parameters)
        _refuse_parts(sum(map(is_partial, parameters)), len(parameters))
        clip(parameters, *args, **kwargs)

    return checked


def _norm_refusing_parts(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a norm so that it refuses gradients of which this rank has only a part."""

    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
        tensors = _as_list(tensors)
        divided = filter(is_partial, [*AVERAGED, *PLACED.values()])
        parts = {id(p.grad) for p in divided if p.grad is not None}
        _refuse_parts(sum(id(tensor) in parts for tensor in tensors), len(tensors))
        return norm(tensors, *args, **kwargs)

    return checked


def _refusing_nothing(gradient_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a wrapper that refuses to clip nothing while gradients are in shards."""

    def wrap(clip: Callable[..., Any]) -> Callable[..., Any]:
        def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = _as_list(tensors)
            known = (optimizer() for optimizer in AVERAGED.values())
            in_shards = any(getattr(one, "gradients_in_shards", False) for one in known)
            if in_shards and all(gradient_of(tensor) is None for tensor in tensors):
                raise RuntimeError(
                    "no parameter has a gradient to clip: this rank's shards of the "
                    "gradients are in the optimizer. Call its clip_grad_norm_ instead, "
                    "or use ZeroRedundancyOptimizer (stage 1)"
                )
            return clip(tensors, *args, **kwargs)

        return checked

    return wrap


def _as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _refuse_parts(count: int, total: int) -> None:
    """Raise RuntimeError if some of the tensors are parts."""
    if count:
        raise RuntimeError(
            f"this rank has only parts of the gradients of {count} of these {total} "
            "parameters, so torch.nn.utils would compute a wrong norm; call "
            "clip_grad_norm_ of the parallel module or of the sharded optimizer"
        )


def _unscale_agreed(unscale: Callable[..., Any]) -> Callable[..., Any]:
    def agreed(scaler: Any, optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
        found = unscale(scaler, getattr(optimizer, "unscaled", optimizer), *args)
        flags = [*found.values()]  # a plain model may be on several GPUs
        own = sum((flag.to(flags[0].device) for flag in flags), torch.zeros(()))
        if (seen := seen_by_all(optimizer, own)) is not own:
            found[own.device] = seen
        return found

    return agreed


def seen_by_all(optimizer: Optimizer, own: Tensor | None) -> Tensor:
    """Return the largest `own` of all ranks that share the optimizer's parameters.

    All these ranks call it together; None counts as 0. If the parameters are not
    divided, all ranks have the same gradients, and nothing is sent.
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
