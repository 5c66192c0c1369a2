"""Make a model parallel, axis by axis: the only place where strategies meet.

    layout = layout_for(8, zero=1, tp=2, pp=2)          # checked, before ranks start
    axes = make_groups(layout.mesh)                     # called by all ranks
    model = parallelize(model, layout, axes)
    optimizer = optimizer_for(model, layout, axes, lr=3e-4)

`spec.py` defines the layouts. The `axis.py` of each folder defines how one kind of
parallelism wraps a model (`strategy.Strategy`). Axes compose because each works
on the local parameters that the previous one left. Chapters 04 and 07 to 11.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.assembly import (
    full_optimizer_state,
    load_full_optimizer_state,
)
from ddp_course.mechanisms.divided import DividedModule
from ddp_course.mechanisms.placements import clip_grad_norm_, groups_around
from ddp_course.mechanisms.states import HasState, Whole
from ddp_course.mechanisms.whole_state import (
    full_state_dict,
    load_full_state_dict,
    names_along,
)
from ddp_course.mesh import Axes
from ddp_course.precision import Autocast
from ddp_course.spec import PRECISIONS, Layout
from ddp_course.strategy import Strategy


def autocast(layout: Layout) -> AbstractContextManager:
    """Return a context in which forward computes in the layout's precision."""
    name = PRECISIONS[layout.precision].products
    return nullcontext() if name is None else Autocast(getattr(torch, name))


def dtype_of(layout: Layout) -> torch.dtype:
    """Return the type of parameters, gradients and optimizer states."""
    return getattr(torch, PRECISIONS[layout.precision].parameters)


# ---- one axis after the other --------------------------------------------------------


def strategies_of(layout: Layout, axes: Axes | None) -> list[Strategy]:
    """Load the folders that the layout asks for; return their strategies, in order.

    A single process (`axes` is None) needs none, unless its replicas are threads, or it
    resumes a local-SGD run of several ranks.
    """
    if not isinstance(layout, Layout) or not isinstance(axes, Axes | None):
        raise ValueError(
            f"layout is a {type(layout).__name__} and axes a {type(axes).__name__}; "
            "pass a Layout, such as layout_for(4, tp=2), then make_groups(layout.mesh)"
        )
    if axes is None and layout.ranks > 1:
        raise ValueError(
            f"axes is None, and the layout has {layout.ranks} ranks; pass "
            "make_groups(layout.mesh, *layout.together)"
        )
    if axes is None and layout.threads == 1 and layout.local is None:
        return []
    modules = [import_module(f"ddp_course.{room}.axis") for room in layout.rooms]
    return [module.strategy(layout) for module in modules]


def parallelize(model: nn.Module, layout: Layout, axes: Axes | None) -> nn.Module:
    """Return `model` wrapped for each axis of `layout`; it is called like `model`.

    `axes` are `make_groups(layout.mesh, *layout.together)`; None without a process
    group. Each axis wraps what the previous one returned. If that fails on one rank,
    all ranks of the job raise: the ranks of other replicas would otherwise continue,
    and wait for this rank forever.
    """
    for strategy in strategies_of(layout, axes):
        wrap = partial(strategy.wrap, model, layout, axes)
        model = wrap() if axes is None else agreed(wrap, None)  # on all ranks
    return model


def optimizer_for(
    model: nn.Module, layout: Layout, axes: Axes | None, lr: float
) -> Optimizer:
    """Return an optimizer for the model that `parallelize` returned.

    It is a plain AdamW over this rank's parameters, unless a strategy has an optimizer
    of its own, as ZeRO and local SGD have.
    """
    strategies = strategies_of(layout, axes)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ValueError(f"model is a {kind}; pass the model that parallelize returned")
    for strategy in strategies:
        if strategy.optimizer is not None:
            return strategy.optimizer(model, layout, axes, lr)
    return AdamW(model.parameters(), lr=lr)


# ---- the whole model -----------------------------------------------------------------


def clip_gradients(model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
    """Scale all gradients so that the whole model's norm is at most `max_norm`.

    Returns the norm before scaling. All ranks call this together, after backward.
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ValueError(f"model is a {kind}; pass the model and its optimizer")
    inner = _without_wrappers(model)
    for owner in (optimizer, inner):
        if hasattr(owner, "clip_grad_norm_"):
            return owner.clip_grad_norm_(max_norm)
    return clip_grad_norm_(inner.parameters(), max_norm)


def whole(model: nn.Module, optimizer: Optimizer) -> tuple[HasState, HasState]:
    """Return objects with the full states of a parallel model and of its optimizer.

    The states have the names and shapes that a single process would save, so that a run
    can resume with another strategy, or another number of ranks. In local SGD, where
    the ranks differ, they hold the states of all ranks.
    """
    inner = _without_wrappers(model)
    if hasattr(optimizer, "whole_states"):
        return optimizer.whole_states(inner)
    shards = hasattr(optimizer, "load_parts")  # ZeRO 1 and 2 shard its states
    if not isinstance(inner, DividedModule):
        if shards:
            state = partial(_consolidated, optimizer)
            optimizer = Whole(state, optimizer.load_state_dict)
        return inner, optimizer
    groups, stepped = inner.groups, optimizer
    load = partial(load_full_optimizer_state, optimizer)
    if shards:  # along one more group
        groups = groups_around(optimizer.process_group, groups)
        stepped = optimizer.optim
        load = optimizer.load_parts
    shapes = inner.plain.shapes
    names = names_along(optimizer, shapes, inner.groups)
    return (
        Whole(partial(full_state_dict, inner), partial(load_full_state_dict, inner)),
        Whole(
            partial(full_optimizer_state, stepped, names, groups),
            lambda state: load(state, names, shapes, groups),
        ),
    )


def _consolidated(optimizer: Optimizer) -> dict[str, Any]:
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else {}


def _without_wrappers(model: nn.Module) -> nn.Module:
    """Return the module within all wrappers: the plain model, or this rank's part."""
    while not isinstance(model, DividedModule) and hasattr(model, "module"):
        model = model.module
    return model
