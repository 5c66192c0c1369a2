"""The cp axis of a layout: every rank has some positions of every sequence."""

from torch import nn

from ddp_course.context_parallel.gpt import context_parallel
from ddp_course.mesh import Axes
from ddp_course.spec import Layout
from ddp_course.strategy import Strategy


def wrap(model: nn.Module, layout: Layout, axes: Axes) -> nn.Module:
    """Divide the sequences of the model among the ranks."""
    return context_parallel(model, axes.group("cp"), attention=layout.attention)


def strategy(layout: Layout) -> Strategy:
    """Return the functions that set up context parallelism for this layout."""
    return Strategy(wrap)
