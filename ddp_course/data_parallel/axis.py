"""The data-parallel axis of a layout: wrap the model so that gradients are averaged.

Chapters 04, 05 and 14.
"""

from collections.abc import Callable
from types import MappingProxyType

import torch.distributed as dist
from torch import nn

from ddp_course.compression import CourseExchange, compress, compressor
from ddp_course.data_parallel.ddp import DistributedDataParallel
from ddp_course.data_parallel.dp import DataParallel
from ddp_course.data_parallel.flat import FlatDistributedDataParallel
from ddp_course.data_parallel.naive import NaiveDistributedDataParallel
from ddp_course.mechanisms.states import PerRankStates
from ddp_course.mesh import Axes
from ddp_course.spec import Layout
from ddp_course.strategy import Strategy, unchanged

Wrapper = Callable[[nn.Module, dist.ProcessGroup], nn.Module]

# `Layout.data_parallel` -> class; None: the training loop itself averages.
WRAPPERS: MappingProxyType[str, Wrapper | None] = MappingProxyType(
    {
        "average": None,
        "naive": NaiveDistributedDataParallel,
        "flat": FlatDistributedDataParallel,
        "ddp": DistributedDataParallel,
        "pytorch": lambda model, group: nn.parallel.DistributedDataParallel(model),
    }
)


def use_threads(model: nn.Module, layout: Layout, axes: Axes | None) -> nn.Module:
    """Wrap a model in DataParallel: each replica is a thread of this one process."""
    n, on_gpus = layout.threads, next(model.parameters()).is_cuda
    return DataParallel(model, range(n) if on_gpus else ["cpu"] * n)


def average(model: nn.Module, layout: Layout, axes: Axes) -> nn.Module:
    """Wrap a model in the class that the layout names."""
    group = axes.group(*layout.averaged)
    return WRAPPERS[layout.data_parallel](model, group)


def average_compressed(model: nn.Module, layout: Layout, axes: Axes) -> nn.Module:
    """Wrap a model in DDP with the layout's compressor as its hook."""
    model = average(model, layout, axes)
    exchange = CourseExchange(axes.group(*layout.averaged))
    model.compressor = compressor(layout.compress, exchange)
    model.register_comm_hook(model.compressor, compress)
    return model


def compressor_states(model: nn.Module) -> dict[str, PerRankStates]:
    """Return the compressors' states: the part of each gradient not yet sent."""
    return {"compressor": PerRankStates(model.compressor)}


def strategy(layout: Layout) -> Strategy:
    """Return the functions that set up data parallelism for this layout."""
    if layout.threads > 1:
        return Strategy(use_threads)
    if layout.compress is not None:
        return Strategy(average_compressed, states=compressor_states)
    by_loop = WRAPPERS[layout.data_parallel] is None
    return Strategy(unchanged if by_loop else average)
