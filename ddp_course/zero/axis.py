"""ZeRO: the ranks along dp shard optimizer states, gradients and parameters.

Chapters 07 and 08.
"""

from types import MappingProxyType

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from ddp_course.mesh import Axes
from ddp_course.spec import PRECISIONS, Layout
from ddp_course.strategy import Strategy
from ddp_course.zero import metered
from ddp_course.zero.sharded_gradient_optimizer import ShardedGradientOptimizer
from ddp_course.zero.stage3 import FullyShardedDataParallel
from ddp_course.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer

# The optimizers of the stages that leave the parameters whole.
OPTIMIZERS = MappingProxyType({1: ZeroRedundancyOptimizer, 2: ShardedGradientOptimizer})


def shard(model: nn.Module, layout: Layout, axes: Axes) -> nn.Module:
    """Wrap a model in FSDP; with autocast, gather in 16 bits and reduce in 32."""
    options = {}
    if name := PRECISIONS[layout.precision].products:
        types = {"compute_dtype": getattr(torch, name), "reduce_dtype": torch.float32}
        options.update(types)
    groups = layout.averaged
    if "replicate" in axes:  # hybrid sharding: replicas have the same shards
        options["replicas"] = axes.group("replicate")
        groups = groups[1:]
    group = axes.group(*groups)
    options |= metered.module(group)  # uses this course's checked collectives
    return FullyShardedDataParallel(model, group, **options)


def sharded_adamw(model: nn.Module, layout: Layout, axes: Axes, lr: float) -> Optimizer:
    """Return an AdamW that shards its states and averages the gradients."""
    group = axes.group(*layout.averaged)
    options = {"lr": lr, **metered.optimizer()}
    return OPTIMIZERS[layout.zero](model.parameters(), AdamW, group, **options)


def strategy(layout: Layout) -> Strategy:
    """Return the functions that set up the layout's ZeRO stage."""
    if layout.zero in OPTIMIZERS:
        return Strategy(optimizer=sharded_adamw)
    return Strategy(shard)
