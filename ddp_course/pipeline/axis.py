"""The pp axis of a layout: wrap the model in `PipelineParallel`. Chapters 10 and 11."""

from torch import nn

from ddp_course.mesh import Axes
from ddp_course.pipeline.pipeline_parallel import PipelineParallel
from ddp_course.spec import Layout
from ddp_course.strategy import Strategy


def wrap(model: nn.Module, layout: Layout, axes: Axes) -> nn.Module:
    """Wrap the model in a pipeline that has this rank's stages."""
    group = axes.group("pp")
    return PipelineParallel(model, layout.schedule, layout.microbatches, group)


def strategy(layout: Layout) -> Strategy:
    """Return the functions that set up the pipeline of this layout."""
    return Strategy(wrap)
