"""The only place where strategies meet: a layout, and a model made parallel by it.

    layout = choose_layout(8, "zero1", tp=2, pp=2)      # checked, before ranks start
    axes = make_groups(layout.mesh)                     # called by all ranks
    model = parallelize(model, layout, axes)
    optimizer = optimizer_for(model, layout, axes, lr=3e-4)

A layout is plain data: a strategy, and a mesh. Along "tp" ranks have other parts of
every matrix, along "pp" other layers, along "dp" other rows of the batch; if shards are
replicated (HSDP), "shard" and "replicate" are in the place of "dp". `parallelize` takes
one axis after the other, and each line goes on with what the line above returned. That
is all that combining takes: what was applied before has made the parameters local.
Chapters 04 and 07 to 11.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import prod
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
from ddp_course.mechanisms.agreement import ReplicaError, attempt, check_same
from ddp_course.mechanisms.norms import clip_grad_norm_
from ddp_course.mechanisms.whole_state import (
    WholeState,
    full_optimizer_state,
    load_full_optimizer_state,
    names_along,
)
from ddp_course.mesh import Axes, Mesh
from ddp_course.model import GPTConfig
from ddp_course.pipeline import SCHEDULES, PipelineParallel
from ddp_course.precision import Autocast
from ddp_course.tensor_parallel import tensor_parallel
from ddp_course.tensor_parallel.checks import indivisible
from ddp_course.zero import (
    FullyShardedDataParallel,
    ShardedGradientOptimizer,
    ZeroRedundancyOptimizer,
)

STRATEGIES = ("average", "dp", "naive", "flat", "ddp", "ddp-shared", "pytorch")
STRATEGIES += ("zero1", "zero2", "zero3", "tp", "pp")  # what each is: train --help
BOTH = ("tp", "pp")
BESIDE = MappingProxyType(  # the axes that a strategy can have beside its own
    dict.fromkeys(("ddp", "ddp-shared", "zero1", "zero2", *BOTH), BOTH)
    | dict.fromkeys(("naive", "flat", "zero3"), ("tp",))
)
WHY_NOT = MappingProxyType(
    {
        "average": "the training loop averages over all ranks",
        "dp": "its replicas are threads of one process",
        "naive": "it would average once for each microbatch",
        "flat": "it would average once for each microbatch",
        "pytorch": "it is there to be compared with",
        "zero3": "every unit would be gathered once for each microbatch; take zero1",
    }
)
# What products of matrices are computed in, by autocast; None is as all the rest.
PRECISIONS = MappingProxyType(
    {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": None}
)
WRAPPERS: MappingProxyType[str, Callable[..., nn.Module]] = MappingProxyType(
    {
        "naive": NaiveDistributedDataParallel,
        "flat": FlatDistributedDataParallel,
        "ddp-shared": partial(DistributedDataParallel, buckets_in_shared_memory=True),
        "pytorch": lambda model, group: nn.parallel.DistributedDataParallel(model),
        "zero3": FullyShardedDataParallel,
    }
)
OUTER = ("average", "nesterov")  # what is done with the mean of the parameters
OPTIMIZERS = MappingProxyType(
    {"zero1": ZeroRedundancyOptimizer, "zero2": ShardedGradientOptimizer}
)


@dataclass(frozen=True)
class Layout:
    """What a training does with its ranks; `choose_layout` makes one.

    Attributes:
        strategy: a name in STRATEGIES.
        mesh: the axes along which there is more than one rank: of dp, or replicate and
            shard, and of pp and tp.
        replicas: threads of the strategy "dp".
        schedule: the order in which the stages of a pipeline work.
        microbatches: the parts in which a pipeline takes its rows.
        precision: a name in PRECISIONS.
        compress: how gradients travel in fewer bytes (`compression.named`), or None.
        local: arguments of LocalSGD, or of DiLoCo, if ranks step alone; or None.
    """

    strategy: str
    mesh: Mesh
    replicas: int = 4
    schedule: str = "1f1b"
    microbatches: int = 4
    precision: str = "fp32"
    compress: str | None = None
    local: Mapping[str, Any] | None = None

    @property
    def parameters_in(self) -> torch.dtype:
        """The type of parameters, gradients and states."""
        return torch.bfloat16 if self.precision == "bf16-pure" else torch.float32

    def autocast(self) -> AbstractContextManager:
        """Return a block in which a model goes forward in this precision."""
        dtype = PRECISIONS[self.precision]
        return nullcontext() if dtype is None else Autocast(dtype)

    def share(self, rank: int) -> tuple[int, int]:
        """Return which part of the rows `rank` has, and of how many parts."""
        here, share, shares = self.mesh.coordinates(rank), 0, 1
        for axis in ("dp", "replicate", "shard"):
            size = self.mesh.sizes.get(axis, 1)
            share, shares = share * size + here.get(axis, 0), shares * size
        return share, shares

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
        elif parts != self.mesh.size:
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
    shard: int | None = None,
    replicas: int = 4,
    schedule: str = "1f1b",
    microbatches: int = 4,
    precision: str = "fp32",
    compress: str | None = None,
    local_steps: int | None = None,
    outer: str | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
) -> Layout:
    """Return the layout of `world_size` ranks; pure.

    Args:
        world_size: the number of ranks.
        strategy: a name in STRATEGIES.
        dp, tp, pp: the number of ranks along each axis. Those that are not told about
            go to the axis of the strategy; if that one is told, to dp.
        shard: of the ranks along dp, how many share one copy; the others have
            replicas of their shards (HSDP). For the strategy "zero3"; None are all.
        replicas, schedule, microbatches, precision, compress: as in Layout.
        local_steps: H, steps that ranks make alone before they average parameters.
        outer: "average", or "nesterov" (DiLoCo), with outer_lr and outer_momentum.

    Raises ValueError, naming the value and what is allowed. Chapter 09.
    """
    for name, value, known in (
        ("strategy", strategy, STRATEGIES),
        ("schedule", schedule, SCHEDULES),
        ("precision", precision, PRECISIONS),
    ):
        if value not in known:
            can = ", ".join(known)
            raise ValueError(f"{name} is {value!r}; it can be one of {can}")
    sizes = {"dp": dp, "pp": pp, "tp": tp}  # tp is innermost: it talks most
    told = {axis: size for axis, size in sizes.items() if size is not None}
    counts = {**told, "replicas": replicas, "microbatches": microbatches}
    counts |= {} if shard is None else {"shard": shard}
    for name, count in counts.items():
        if type(count) is not int or count < 1:
            raise ValueError(f"{name} is {count!r}; it must be 1 or more")
    rest = strategy if strategy in sizes and strategy not in told else "dp"
    told.setdefault(rest, max(1, world_size // prod(told.values())))
    mesh = Mesh({a: told[a] for a in sizes if told.get(a, 1) > 1} or {"dp": 1})
    mesh.check(world_size)
    _check_strategy(strategy, mesh)
    if shard is not None:
        mesh = _hybrid(strategy, mesh, shard)
    if PRECISIONS[precision] and schedule == "zero_bubble" and "pp" in mesh.axes:
        raise ValueError(
            f"precision {precision!r} cannot be with schedule 'zero_bubble', whose "
            "backward in two halves takes weights as they are; take bf16-pure, or 1f1b"
        )
    cut = schedule, microbatches
    layout = Layout(strategy, mesh, replicas, *cut, precision, compress)
    of_outer = {"lr": outer_lr, "momentum": outer_momentum}
    layout = _alone(layout, local_steps, outer, of_outer)
    if compress is not None:
        _check_compress(layout)
    return layout


def _check_strategy(strategy: str, mesh: Mesh) -> None:
    if strategy == "dp" and (n := mesh.size) > 1:
        told = f"strategy 'dp' is one process with threads, and here are {n} ranks"
        raise ValueError(f"{told}; start one, or take another strategy")
    allowed = BESIDE.get(strategy, ())
    if wrong := set(mesh.axes) - {"dp", *allowed}:
        with_others = " and ".join(("dp", *allowed)) if allowed else "dp alone"
        raise ValueError(
            f"the mesh is {mesh}; strategy {strategy!r} can have {with_others}, not "
            f"{' and '.join(sorted(wrong))}: {WHY_NOT[strategy]}"
        )
    if strategy in BOTH and mesh.size > 1 and strategy not in mesh.axes:
        needs = f"needs two ranks or more along {strategy}"
        raise ValueError(f"the mesh is {mesh}; strategy {strategy!r} {needs}")


def _alone(
    layout: Layout, steps: int | None, outer: str | None, told: dict[str, float | None]
) -> Layout:
    """Return the layout with what LocalSGD or DiLoCo is given, or as it is."""
    told = {name: value for name, value in told.items() if value is not None}
    if steps is None and (outer or told):
        raise ValueError("an outer optimizer is of no use without local_steps")
    if outer not in (None, *OUTER):
        raise ValueError(f"outer is {outer!r}; it can be {' or '.join(OUTER)}")
    if told and outer != "nesterov":
        raise ValueError(f"outer_{min(told)} is of no use without outer 'nesterov'")
    if steps is None:
        return layout
    if layout.strategy != "ddp" or set(layout.mesh.axes) != {"dp"} or layout.compress:
        raise ValueError(
            f"local_steps is {steps}; ranks that step alone have whole models and send "
            "no gradients: take the strategy 'ddp' along dp alone, without compress"
        )
    if type(steps) is not int or steps < 1:
        raise ValueError(f"local_steps is {steps!r}; it must be 1 or more")
    for name, value in told.items():
        most = math.inf if name == "lr" else 1
        if not 0 <= value < most:
            raise ValueError(f"outer_{name} is {value!r}; it must be 0 to {most}")
    if outer == "nesterov":
        told = {"lr": 0.7, "momentum": 0.9} | told  # those of the paper
    return replace(layout, local={"every": steps, **told})


def _check_compress(layout: Layout) -> None:
    compressor(layout.compress)
    if layout.strategy != "ddp" or layout.mesh.axes != ("dp",):
        raise ValueError(
            f"compress is {layout.compress!r}, strategy {layout.strategy!r} and the "
            f"mesh {layout.mesh}; compressing is for the strategy 'ddp', along dp alone"
        )
    if layout.mesh.size == 1:
        told = f"compress is {layout.compress!r}, and one rank sends nothing"
        raise ValueError(f"{told}; take two ranks or more")
    if layout.precision == "fp16":
        raise ValueError(
            f"compress {layout.compress!r} cannot be with precision 'fp16': what is "
            "left out of a scaled gradient would be added to one of another scale; "
            "take bf16"
        )


def _hybrid(strategy: str, mesh: Mesh, shard: int) -> Mesh:
    """Return the mesh with dp divided: `shard` ranks have one copy together."""
    dp = mesh.sizes.get("dp", 1)
    if strategy != "zero3" or dp % shard:
        raise ValueError(
            f"shard is {shard}, strategy {strategy!r} and dp {dp}; shard must be a "
            "divisor of dp, and is for the strategy 'zero3'"
        )
    if shard == dp:
        return mesh
    others = {axis: size for axis, size in mesh.sizes.items() if axis != "dp"}
    return Mesh({"replicate": dp // shard, "shard": shard, **others})


# ---- one axis after the other --------------------------------------------------------


def parallelize(model: nn.Module, layout: Layout, axes: Axes | None) -> nn.Module:
    """Return `model` made parallel as `layout` says, called like it, and trained.

    The order in which parallelisms are applied is the order of this function's lines.
    `axes` are `make_groups(layout.mesh)`; None without a process group, where all
    strategies but "dp" return the model as it is. Stages 1 and 2 of ZeRO are the
    optimizer's affair (`optimizer_for`), "average" the training loop's.
    """
    if layout.strategy == "dp":
        n, on_gpus = layout.replicas, next(model.parameters()).is_cuda
        return DataParallel(model, range(n) if on_gpus else ["cpu"] * n)
    if axes is None:
        return model
    if "tp" in axes:
        model = _everywhere(tensor_parallel, model, axes.group("tp"))
    if "pp" in axes:
        how = layout.schedule, layout.microbatches, axes.group("pp")
        model = _everywhere(PipelineParallel, model, *how)
    wrap = WRAPPERS.get(layout.strategy, DistributedDataParallel)
    if layout.strategy == "zero3" and (dtype := PRECISIONS[layout.precision]):
        # Gathered in 16 bits, and summed in float32, as the others sum gradients.
        wrap = partial(wrap, compute_dtype=dtype, reduce_dtype=torch.float32)
    if "shard" in axes:
        return wrap(model, axes.group("shard"), replicas=axes.group("replicate"))
    if layout.local is not None:
        return model
    if "dp" in axes and layout.strategy not in ("average", *OPTIMIZERS):
        model = wrap(model, axes.group("dp"))
    if layout.compress is not None:
        exchange = CourseExchange(axes.group("dp"))
        model.register_comm_hook(compressor(layout.compress, exchange), compress)
    return model


def _everywhere(make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """Make a part of a model; where one cannot be made, all ranks of all axes raise.

    Otherwise the ranks of another replica would go on, and wait for those of this one.
    """
    problem, made = attempt(lambda: make(*args), ReplicaError)
    check_same({}, problem.removesuffix(". Nothing was sent."), None)
    return made


def optimizer_for(
    model: nn.Module, layout: Layout, axes: Axes | None, lr: float
) -> torch.optim.Optimizer:
    """Return the AdamW that trains what `parallelize` returned.

    In stages 1 and 2 of ZeRO it is the optimizer that shards, and averages. Otherwise
    it is a plain one, which is given nothing but what this rank has of the model.
    """
    if axes is not None and "dp" in axes and layout.strategy in OPTIMIZERS:
        shards = OPTIMIZERS[layout.strategy]
        group = axes.group("dp")
        return shards(model.parameters(), torch.optim.AdamW, group, lr=lr)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if layout.local is not None:
        kind = DiLoCo if "lr" in layout.local else LocalSGD
        return kind(optimizer, model, **layout.local)
    return optimizer


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
    inner, zero = _without_wrappers(model), type(optimizer) in OPTIMIZERS.values()
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
    if layout.compress is None:
        return None
    return EachRanks(model.ending.launch.state)


def _without_wrappers(model: nn.Module) -> nn.Module:
    """Return what is averaged: the plain model, or a part of it."""
    while not isinstance(model, WholeState) and hasattr(model, "module"):
        model = model.module
    return model


def _consolidated(optimizer: Any) -> dict[str, Any]:
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else {}
