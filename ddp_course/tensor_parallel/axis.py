"""The tp axis of a layout: every rank has a part of most matrices. Chapter 09."""

from torch import nn

from ddp_course.mesh import Axes
from ddp_course.spec import Layout
from ddp_course.strategy import Strategy
from ddp_course.tensor_parallel.gpt import tensor_parallel


def wrap(model: nn.Module, layout: Layout, axes: Axes) -> nn.Module:
    """Cut the matrices of a model; keep this rank's parts. Return the model."""
    return tensor_parallel(model, axes.group("tp"))


def strategy(layout: Layout) -> Strategy:
    """Return the functions that set up tensor parallelism for this layout."""
    return Strategy(wrap)
