"""Layouts: what a training does with its ranks, and the model made parallel that way.

    layout = choose_layout(4, "tp", dp=2)       # checked, before anything is started
    model = parallelize(model, layout)          # called by all ranks

A layout is plain data: a strategy, and a mesh of one or two axes (`mesh`). Along "dp"
ranks have other rows of the batch, along "pp" other layers, along "tp" other parts of
every matrix. `parallelize`, `optimizer_for` and `whole` are the only places of the
course where strategies meet. Chapters 04 and 07 to 10.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.data_parallel import (
    DataParallel,
    DistributedDataParallel,
    FlatDistributedDataParallel,
    NaiveDistributedDataParallel,
)
from ddp_course.mesh import Mesh, make_groups
from ddp_course.model import GPTConfig
from ddp_course.pipeline import SCHEDULES, PipelineParallel
from ddp_course.tensor_parallel import tensor_parallel
from ddp_course.tensor_parallel.gpt import indivisible
from ddp_course.zero import (
    FullyShardedDataParallel,
    ShardedGradientOptimizer,
    ZeroRedundancyOptimizer,
)

STRATEGIES = MappingProxyType(
    {
        "average": "one all-reduce per parameter, by the training loop, after backward",
        "dp": "one process, a thread for each replica",
        "naive": "one all-reduce per parameter, when backward is through",
        "flat": "one all-reduce for all parameters, when backward is through",
        "ddp": "all-reduces of buckets, while backward runs",
        "ddp-shared": "the same, with buckets in memory that all ranks see",
        "pytorch": "PyTorch's DistributedDataParallel",
        "zero1": "optimizer states are sharded",
        "zero2": "and gradients",
        "zero3": "and parameters: fully sharded data parallelism",
        "tp": "tensor parallelism: every rank has a part of every matrix",
        "pp": "pipeline parallelism: every rank has some of the layers",
    }
)
BESIDE_DP = {"tp": ("tp",), "pp": ("pp",), "ddp": ("tp", "pp")}  # others have dp alone


@dataclass(frozen=True)
class Layout:
    """What a training does with its ranks; `choose_layout` makes one.

    Attributes:
        strategy: a name in STRATEGIES.
        mesh: the axes along which there is more than one rank, of dp, pp and tp.
        replicas: threads of the strategy "dp".
        schedule: the order in which the stages of a pipeline work.
        microbatches: the parts in which a pipeline takes its rows.
    """

    strategy: str
    mesh: Mesh
    replicas: int = 4
    schedule: str = "1f1b"
    microbatches: int = 4

    def share(self, rank: int) -> tuple[int, int]:
        """Return which part of the rows `rank` has, and of how many: along dp."""
        return self.mesh.coordinates(rank).get("dp", 0), self.mesh.sizes.get("dp", 1)

    def check(
        self, steps: int, batch_size: int, config: GPTConfig | None = None
    ) -> None:
        """Raise ValueError, saying what is allowed, unless this can be trained.

        With the `config` of the model, also if the model cannot be cut like this.
        """
        if steps < 0:
            raise ValueError(f"steps is {steps}; it must be 0 or more")
        parts, whose = self.share(0)[1], "rank"
        if self.strategy == "dp":
            parts, whose = self.replicas, "replica"
        elif self.mesh.axes != ("dp",):
            whose = "replica"
        if batch_size < 1 or batch_size % parts:
            raise ValueError(
                f"{batch_size} rows cannot be shared equally by {parts} {whose}"
                f"{'s' * (parts > 1)}; make the batch size a multiple of {parts}"
            )
        if "pp" in self.mesh.axes and batch_size // parts < self.microbatches:
            raise ValueError(
                f"{batch_size // parts} rows cannot be cut into {self.microbatches} "
                f"microbatches; make the batch size {parts * self.microbatches} or more"
            )
        if config is not None and (wrong := self._too_many_for(config)):
            raise ValueError(wrong)

    def _too_many_for(self, config: GPTConfig) -> str | None:
        """Return why a model cannot be cut for so many ranks, or None."""
        tp, pp = (self.mesh.sizes.get(axis, 1) for axis in ("tp", "pp"))
        stages = pp * (2 if self.schedule == "interleaved" else 1)
        layers = config.n_layer + 2
        if pp > 1 and stages > layers:
            return (
                f"schedule {self.schedule!r} on {pp} ranks has {stages} stages, and "
                f"the model has {layers} layers, embedding and head among them; take "
                "fewer ranks, another schedule, or a model with more layers"
            )
        return indivisible(config, tp)


def choose_layout(
    world_size: int,
    strategy: str = "average",
    *,
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    replicas: int = 4,
    schedule: str = "1f1b",
    microbatches: int = 4,
) -> Layout:
    """Return the layout of `world_size` ranks; pure.

    Args:
        world_size: the number of ranks.
        strategy: a name in STRATEGIES.
        dp, tp, pp: the number of ranks along each axis. Those that are not told about
            go to the axis of the strategy; if that one is told, to dp.
        replicas, schedule, microbatches: as in Layout.

    Raises ValueError, naming the value and what is allowed. Chapter 09.
    """
    for name, value, known in (
        ("strategy", strategy, STRATEGIES),
        ("schedule", schedule, SCHEDULES),
    ):
        if value not in known:
            raise ValueError(
                f"{name} is {value!r}; it can be one of {', '.join(known)}"
            )
    sizes = {"dp": dp, "pp": pp, "tp": tp}  # tp is innermost: it talks most
    told = {axis: size for axis, size in sizes.items() if size is not None}
    counts = {**told, "replicas": replicas, "microbatches": microbatches}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be 1 or more")
    rest = strategy if strategy in sizes and strategy not in told else "dp"
    told.setdefault(rest, max(1, world_size // prod(told.values())))
    mesh = Mesh({a: told[a] for a in sizes if told.get(a, 1) > 1} or {"dp": 1})
    mesh.check(world_size)
    _check_strategy(strategy, mesh)
    return Layout(strategy, mesh, replicas, schedule, microbatches)


def _check_strategy(strategy: str, mesh: Mesh) -> None:
    """Raise ValueError unless `strategy` can be on `mesh`."""
    if strategy == "dp" and mesh.size > 1:
        raise ValueError(
            f"strategy 'dp' is one process with threads, and here are {mesh.size} "
            f"ranks; start one, or take another strategy"
        )
    beside, allowed = set(mesh.axes) - {"dp"}, BESIDE_DP.get(strategy, ())
    if len(beside) > 1 or not beside <= set(allowed):
        with_others = " or ".join(f"dp x {axis}" for axis in allowed)
        raise ValueError(
            f"the mesh is {mesh}; strategy {strategy!r} can have "
            f"{with_others or 'dp alone; ddp can have dp x tp or dp x pp'}"
        )
    if strategy in ("tp", "pp") and mesh.size > 1 and strategy not in mesh.axes:
        raise ValueError(
            f"the mesh is {mesh}; strategy {strategy!r} needs two ranks or more along "
            f"{strategy}"
        )


def parallelize(model: nn.Module, layout: Layout) -> nn.Module:
    """Return `model` made parallel as `layout` says, called like it, and trained.

    The order in which parallelisms are applied is the order of this function's lines.
    Without a process group, all strategies but "dp" return the model as it is.
    """
    strategy = layout.strategy
    if strategy == "dp":
        n, on_gpus = layout.replicas, next(model.parameters()).is_cuda
        return DataParallel(model, range(n) if on_gpus else ["cpu"] * n)
    if strategy in ("average", "zero1", "zero2") or not dist.is_initialized():
        return model
    axes = make_groups(layout.mesh)
    group = axes.group("dp") if "dp" in axes else None
    if "tp" in axes:
        model = tensor_parallel(model, axes.group("tp"))
    if "pp" in axes:
        how = layout.schedule, layout.microbatches, axes.group("pp")
        model = PipelineParallel(model, *how)
        return model if group is None else DistributedDataParallel(model, group)
    if group is None:
        return model
    if strategy == "naive":
        return NaiveDistributedDataParallel(model, group)
    if strategy == "flat":
        return FlatDistributedDataParallel(model, group)
    if strategy == "pytorch":
        return nn.parallel.DistributedDataParallel(model)
    if strategy == "zero3":
        return FullyShardedDataParallel(model, group)
    return DistributedDataParallel(
        model, group, buckets_in_shared_memory=strategy == "ddp-shared"
    )


def optimizer_for(model: nn.Module, layout: Layout, lr: float) -> torch.optim.Optimizer:
    """Return the AdamW that trains what `parallelize` returned.

    In stages 1 and 2 of ZeRO it is the optimizer that shards, and averages. Otherwise
    it is a plain one, which is given nothing but what this rank has of the model.
    """
    params, alone = model.parameters(), not dist.is_initialized()
    if layout.strategy == "zero1" and not alone:
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=lr)
    if layout.strategy == "zero2" and not alone:
        return ShardedGradientOptimizer(params, torch.optim.AdamW, lr=lr)
    return torch.optim.AdamW(params, lr=lr)


@dataclass(frozen=True)
class Whole:
    """The states of something sharded, as one process would have them.

    Both functions are called by all ranks; what the first returns is whole on rank 0.
    """

    state_dict: Callable[[], dict]
    load_state_dict: Callable[[dict], None]


def whole(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module | Whole, torch.optim.Optimizer | Whole]:
    """Return what has the whole states of a parallel model and of its optimizer.

    They have the names and shapes of the plain ones, so that a run can go on with
    another strategy, or another number of ranks.
    """
    while not hasattr(model, "full_state_dict") and hasattr(model, "module"):
        model = model.module  # what is averaged: the plain model, or a part of it
    if hasattr(model, "full_state_dict"):
        return (
            Whole(model.full_state_dict, model.load_full_state_dict),
            Whole(
                partial(model.full_optimizer_state_dict, optimizer, rank0_only=True),
                partial(model.load_full_optimizer_state_dict, optimizer),
            ),
        )
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        consolidated = partial(_consolidated, optimizer)
        return model, Whole(consolidated, optimizer.load_state_dict)
    return model, optimizer


def _consolidated(optimizer: ZeroRedundancyOptimizer) -> dict:
    """Return all ranks' states on rank 0."""
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else {}
