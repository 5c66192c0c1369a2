"""The only place where strategies meet: make a model parallel, axis by axis.

    layout = layout_for(8, zero=1, tp=2, pp=2)          # checked, before ranks start
    axes = make_groups(layout.mesh)                     # called by all ranks
    model = parallelize(model, layout, axes)
    optimizer = optimizer_for(model, layout, axes, lr=3e-4)

What can be asked for stands in `spec.py`. `parallelize` applies one axis after the
other, and each line goes on with what the line above returned. That is all that
combining takes: the axis before has made the parameters local. Chapters 04 and 07
to 11.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.checkpoint import EachRanks
from ddp_course.compression import CourseExchange, compress, compressor
from ddp_course.data_parallel import (
    DataParallel,
    DistributedDataParallel,
    FlatDistributedDataParallel,
    NaiveDistributedDataParallel,
)
from ddp_course.local_sgd import DiLoCo, LocalSGD, LocalSteps
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.assembly import (
    full_optimizer_state,
    load_full_optimizer_state,
    names_along,
)
from ddp_course.mechanisms.placements import clip_grad_norm_
from ddp_course.mechanisms.whole_state import WholeState
from ddp_course.mesh import Axes
from ddp_course.model import GPTConfig
from ddp_course.pipeline import PipelineParallel
from ddp_course.precision import Autocast
from ddp_course.spec import Layout, SpecError
from ddp_course.tensor_parallel import tensor_parallel
from ddp_course.tensor_parallel.checks import indivisible
from ddp_course.zero import (
    FullyShardedDataParallel,
    ShardedGradientOptimizer,
    ZeroRedundancyOptimizer,
)

# The types in which autocast computes products of matrices.
AUTOCAST = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16})


def autocast(layout: Layout) -> AbstractContextManager:
    """Return a block in which a model goes forward in the layout's precision."""
    dtype = AUTOCAST.get(layout.precision)
    return nullcontext() if dtype is None else Autocast(dtype)


def dtype_of(layout: Layout) -> torch.dtype:
    """Return the type of parameters, gradients and states."""
    return torch.bfloat16 if layout.precision == "bf16-pure" else torch.float32


def check_parts(layout: Layout, config: GPTConfig) -> None:
    """Raise ValueError if a GPT of these sizes cannot be cut along tp or pp.

    Also if the layout's compressor cannot have its amount.
    """
    if layout.compress is not None:
        compressor(layout.compress)
    layout.check(layers=config.n_layer + 2)  # embedding and head, too
    if problem := indivisible(config, layout.tp):
        raise SpecError(problem, "tp")


# ---- one axis after the other --------------------------------------------------------


def parallelize(model: nn.Module, layout: Layout, axes: Axes | None) -> nn.Module:
    """Return `model` made parallel as `layout` says, called like it, and trained.

    `axes` are `make_groups(layout.mesh)`; None without a process group. Stages 1 and 2
    of ZeRO are the optimizer's affair (`optimizer_for`), "average" the training loop's.
    """
    if layout.threads > 1:
        n, on_gpus = layout.threads, next(model.parameters()).is_cuda
        return DataParallel(model, range(n) if on_gpus else ["cpu"] * n)
    if axes is None:
        return model
    if "tp" in axes:
        model = _on_all_ranks(tensor_parallel, model, axes.group("tp"))
    if "pp" in axes:
        how = layout.schedule, layout.microbatches, axes.group("pp")
        model = _on_all_ranks(PipelineParallel, model, *how)
    if "shard" in axes:
        shard, replicate = axes.group("shard"), axes.group("replicate")
        model = shard_fully(model, layout, shard, replicas=replicate)
    elif "dp" in axes:
        model = strategy_of(layout).wrap(model, layout, axes.group("dp"))
    return model


def _on_all_ranks(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Make a part of a model; where one cannot be made, all ranks of all axes raise.

    Otherwise the ranks of another replica would go on, and wait for those of this one.
    """
    return agreed(lambda: make(*args), None)


# ---- what the ranks of dp do ---------------------------------------------------------


def leave(model: nn.Module, layout: Layout, group: dist.ProcessGroup) -> nn.Module:
    """Return the model as it is: the optimizer, or the training loop, averages."""
    return model


def wrap_in(wrapper: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a strategy's `wrap` that is a class of model and group."""
    return lambda model, layout, group: wrapper(model, group)


def average_buckets(
    model: nn.Module, layout: Layout, group: dist.ProcessGroup
) -> nn.Module:
    """Wrap a model in DDP, with a compressor if the layout names one."""
    model = DistributedDataParallel(model, group)
    if layout.compress is not None:
        model.compressor = compressor(layout.compress, CourseExchange(group))
        model.register_comm_hook(model.compressor, compress)
    return model


def shard_fully(
    model: nn.Module, layout: Layout, group: dist.ProcessGroup, **more: Any
) -> nn.Module:
    """Wrap a model in FSDP; under autocast it gathers in 16 bits, and sums in 32."""
    if dtype := AUTOCAST.get(layout.precision):
        more |= {"compute_dtype": dtype, "reduce_dtype": torch.float32}
    return FullyShardedDataParallel(model, group, **more)


def step_alone(
    optimizer: torch.optim.Optimizer, model: nn.Module, layout: Layout
) -> torch.optim.Optimizer:
    """Wrap a plain optimizer so that ranks average parameters now and then."""
    kind = DiLoCo if "lr" in layout.local else LocalSGD
    return kind(optimizer, model, **layout.local)


@dataclass(frozen=True)
class Strategy:
    """What the ranks of dp do: how they wrap a model, and which optimizer shards.

    Attributes:
        wrap: takes the model, the layout and the group of dp.
        optimizer: the class that shards states and averages; None is a plain AdamW.
    """

    wrap: Callable[[nn.Module, Layout, dist.ProcessGroup], nn.Module] = leave
    optimizer: Callable[..., torch.optim.Optimizer] | None = None


AVERAGING = MappingProxyType(  # Layout.data_parallel, with zero 0
    {
        "average": Strategy(),
        "naive": Strategy(wrap_in(NaiveDistributedDataParallel)),
        "flat": Strategy(wrap_in(FlatDistributedDataParallel)),
        "ddp": Strategy(average_buckets),
        "pytorch": Strategy(
            wrap_in(lambda m, g: nn.parallel.DistributedDataParallel(m))
        ),
    }
)
STAGES = MappingProxyType(  # Layout.zero
    {
        1: Strategy(optimizer=ZeroRedundancyOptimizer),
        2: Strategy(optimizer=ShardedGradientOptimizer),
        3: Strategy(shard_fully),
    }
)


def strategy_of(layout: Layout) -> Strategy:
    """Return what the ranks of dp do in this layout."""
    if layout.local is not None:
        return Strategy()
    return STAGES.get(layout.zero) or AVERAGING[layout.data_parallel]


def optimizer_for(
    model: nn.Module, layout: Layout, axes: Axes | None, lr: float
) -> torch.optim.Optimizer:
    """Return the AdamW that trains what `parallelize` returned.

    In stages 1 and 2 of ZeRO it is the optimizer that shards, and averages. Otherwise
    it is a plain one, which is given nothing but what this rank has of the model.
    """
    shards = strategy_of(layout).optimizer
    if axes is not None and "dp" in axes and shards is not None:
        group = axes.group("dp")
        return shards(model.parameters(), torch.optim.AdamW, group, lr=lr)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return optimizer if layout.local is None else step_alone(optimizer, model, layout)


# ---- what is of the whole model ------------------------------------------------------


def clip_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float
) -> Tensor:
    """Scale all gradients so that the whole model's norm is at most `max_norm`.

    Returns the norm as it was, on all ranks, which call this together after backward.
    """
    inner = _without_wrappers(model)
    for knows in (optimizer, inner):
        if hasattr(knows, "clip_grad_norm_"):
            return knows.clip_grad_norm_(max_norm)
    return clip_grad_norm_(inner.parameters(), max_norm)


@dataclass(frozen=True)
class Whole:
    """The states of something divided, as one process would have them.

    Both functions are called by all ranks; what the first returns is whole on rank 0
    at least.
    """

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], object]


def whole(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module | Whole, torch.optim.Optimizer | Whole]:
    """Return what has the whole states of a parallel model and of its optimizer.

    They have the names and shapes of the plain ones, so that a run can go on with
    another strategy, or another number of ranks. Of ranks that step alone each has its
    own.
    """
    if isinstance(optimizer, LocalSteps):
        return EachRanks(model), EachRanks(optimizer)
    shards = [stage.optimizer for stage in STAGES.values()]
    inner, zero = _without_wrappers(model), type(optimizer) in shards
    if not isinstance(inner, WholeState):
        if zero:
            state = partial(_consolidated, optimizer)
            optimizer = Whole(state, optimizer.load_state_dict)
        return inner, optimizer
    names = names_along(optimizer, inner.plain.shapes, inner.groups)
    groups, steps = inner.groups, optimizer
    load = partial(load_full_optimizer_state, optimizer)
    if zero:  # the pieces that it steps were cut along one group more
        groups, steps = (*groups, optimizer.process_group), optimizer.optim
        load = optimizer.load_parts
    where = names, inner.plain.shapes, groups
    state = partial(full_optimizer_state, steps, names, groups)
    return (
        Whole(inner.full_state_dict, inner.load_full_state_dict),
        Whole(state, lambda state: load(state, *where)),
    )


def compressor_of(model: nn.Module, layout: Layout) -> EachRanks | None:
    """Return the states of all ranks' compressors: what each has yet to send."""
    return None if layout.compress is None else EachRanks(model.compressor)


def _without_wrappers(model: nn.Module) -> nn.Module:
    """Return what is averaged: the plain model, or a part of it."""
    while not isinstance(model, WholeState) and hasattr(model, "module"):
        model = model.module
    return model


def _consolidated(optimizer: Any) -> dict[str, Any]:
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else {}
