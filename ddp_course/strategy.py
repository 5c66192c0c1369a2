"""What a folder says about its kind of parallelism, so that `parallelize` can apply it.

A folder has a file `axis.py` with a function `strategy(layout)`, which returns one of
these. `parallelize` knows no class of any folder: it loads those that a layout asks for
(`Layout.rooms`) and trusts what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ddp_course.mechanisms.states import HasState
    from ddp_course.mesh import Axes
    from ddp_course.spec import Layout

    Wrap = Callable[[nn.Module, Layout, Axes], nn.Module]
    MakeOptimizer = Callable[[nn.Module, Layout, Axes, float], Optimizer]


def unchanged(model: nn.Module, layout: Layout, axes: Axes) -> nn.Module:
    """Return the model as it is."""
    return model


@dataclass(frozen=True)
class Strategy:
    """How the ranks along one axis train a model together.

    Attributes:
        wrap: takes the model that the axes before have left, the layout, and the groups
            of the mesh; returns a model that is called like it. All ranks call it
            together, and all raise if one of them does.
        optimizer: takes what all axes have made of the model, the layout, the groups
            and a learning rate; returns the optimizer. None asks for a plain AdamW.
        states: takes the wrapped model; returns what must be saved beside the states of
            model and optimizer, by name.
        finish: takes the wrapped model when training has ended, on all ranks.
            Afterwards every rank has the same model. None if they always have.

    A sharded model is a `mechanisms.whole_state.WholeState`. If each rank has another
    optimizer state, the optimizer has a method `whole_states(model)`: it returns two
    objects with the states of all ranks, of their models and of their optimizers.
    """

    wrap: Wrap = unchanged
    optimizer: MakeOptimizer | None = None
    states: Callable[[nn.Module], Mapping[str, HasState]] = lambda model: {}
    finish: Callable[[nn.Module], None] | None = None
