"""The axis pp: every rank has some layers, and `step` trains them. Chapters 10, 11."""

from torch import nn

from ddp_course.mesh import Axes
from ddp_course.pipeline.pipeline_parallel import PipelineParallel
from ddp_course.spec import Layout
from ddp_course.strategy import Strategy


def wrap(model: nn.Module, layout: Layout, axes: Axes) -> nn.Module:
    """Return this rank's stages of the model."""
    how = layout.schedule, layout.microbatches, axes.group("pp")
    return PipelineParallel(model, *how)


def strategy(layout: Layout) -> Strategy:
    """Return how the ranks along pp train."""
    return Strategy(wrap)
