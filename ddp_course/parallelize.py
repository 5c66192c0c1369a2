"""The only place where strategies meet: make a model parallel, axis by axis.

    layout = layout_for(8, zero=1, tp=2, pp=2)          # checked, before ranks start
    axes = make_groups(layout.mesh)                     # called by all ranks
    model = parallelize(model, layout, axes)
    optimizer = optimizer_for(model, layout, axes, lr=3e-4)

`spec.py` says what can be asked for, and the `axis.py` of each folder how its kind of
parallelism wraps a model (`strategy.Strategy`). Axes compose because each divides what
the one before has left: the axis before has made the parameters local. Chapters 04 and
07 to 11.
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
    names_along,
)
from ddp_course.mechanisms.divided import DividedModule
from ddp_course.mechanisms.placements import clip_grad_norm_
from ddp_course.mechanisms.states import HasState, Whole
from ddp_course.mechanisms.whole_state import full_state_dict, load_full_state_dict
from ddp_course.mesh import Axes
from ddp_course.precision import Autocast
from ddp_course.spec import PRECISIONS, Layout
from ddp_course.strategy import Strategy


def autocast(layout: Layout) -> AbstractContextManager:
    """Return a block in which a model goes forward in the layout's precision."""
    name = PRECISIONS[layout.precision].products
    return nullcontext() if name is None else Autocast(getattr(torch, name))


def dtype_of(layout: Layout) -> torch.dtype:
    """Return the type of parameters, gradients and states."""
    return getattr(torch, PRECISIONS[layout.precision].parameters)


# ---- one axis after the other --------------------------------------------------------


def strategies_of(layout: Layout, axes: Axes | None) -> list[Strategy]:
    """Load the folders that the layout asks for; return their strategies, in order.

    One process alone (`axes` is None) needs none, unless its replicas are threads, or
    its optimizer goes on with a state of ranks that stepped alone.
    """
    if axes is None and layout.threads == 1 and layout.local is None:
        return []
    modules = [import_module(f"ddp_course.{room}.axis") for room in layout.rooms]
    return [module.strategy(layout) for module in modules]


def parallelize(model: nn.Module, layout: Layout, axes: Axes | None) -> nn.Module:
    """Return `model` made parallel as `layout` says, called like it, and trained.

    `axes` are `make_groups(layout.mesh, *layout.together)`; None without a process
    group. Each axis goes on with what the one before returned. If one cannot be applied
    on some rank, all ranks of all axes raise: those of another replica would otherwise
    go on, and wait for this one's.
    """
    for strategy in strategies_of(layout, axes):
        wrap = partial(strategy.wrap, model, layout, axes)
        model = wrap() if axes is None else agreed(wrap, None)  # None: all ranks
    return model


def optimizer_for(
    model: nn.Module, layout: Layout, axes: Axes | None, lr: float
) -> Optimizer:
    """Return the AdamW that trains what `parallelize` returned.

    A plain one gets nothing but this rank's part of the model. A strategy may bring its
    own: one that shards its states, or steps alone.
    """
    for strategy in strategies_of(layout, axes):
        if strategy.optimizer is not None:
            return strategy.optimizer(model, layout, axes, lr)
    return AdamW(model.parameters(), lr=lr)


# ---- what concerns the whole model ---------------------------------------------------


def clip_gradients(model: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
    """Scale all gradients so that the whole model's norm is at most `max_norm`.

    Returns the norm as it was, on all ranks, which call this together after backward.
    """
    inner = _without_wrappers(model)
    for knows in (optimizer, inner):
        if hasattr(knows, "clip_grad_norm_"):
            return knows.clip_grad_norm_(max_norm)
    return clip_grad_norm_(inner.parameters(), max_norm)


def whole(model: nn.Module, optimizer: Optimizer) -> tuple[HasState, HasState]:
    """Return objects with the whole states of a parallel model and of its optimizer.

    The states have the names and shapes of the plain ones, so that a run can go on with
    another strategy, or another number of ranks. Where ranks step alone, they are the
    states of all ranks.
    """
    inner = _without_wrappers(model)
    if hasattr(optimizer, "whole_states"):
        return optimizer.whole_states(inner)
    shards = hasattr(optimizer, "load_parts")  # it steps pieces, as in ZeRO 1 and 2
    if not isinstance(inner, DividedModule):
        if shards:
            state = partial(_consolidated, optimizer)
            optimizer = Whole(state, optimizer.load_state_dict)
        return inner, optimizer
    groups, stepped = inner.groups, optimizer
    load = partial(load_full_optimizer_state, optimizer)
    if shards:  # the pieces were cut along one group more
        groups, stepped = (*groups, optimizer.process_group), optimizer.optim
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
    """Return what is averaged: the plain model, or a part of it."""
    while not isinstance(model, DividedModule) and hasattr(model, "module"):
        model = model.module
    return model
