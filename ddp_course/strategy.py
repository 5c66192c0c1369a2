"""The interface between `parallelize` and a folder with one kind of parallelism.

Such a folder has a file `axis.py` with a function `strategy(layout)`, which returns a
`Strategy`. `parallelize` knows no class of any folder: it loads the folders that a
layout names (`Layout.rooms`) and calls the functions in their strategies.
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
    """The functions with which the ranks along one axis train a model together.

    Attributes:
        wrap: takes the model that the previous axes returned, the layout, and the
            groups of the mesh; returns a model with the same arguments. All ranks call
            it together, and all raise if one of them does.
        optimizer: takes the model that all axes have wrapped, the layout, the groups
            and a learning rate; returns the optimizer. None asks for a plain AdamW.
        states: takes the wrapped model; returns further objects whose state a
            checkpoint must hold, by name.
        finish: takes the wrapped model, on all ranks, when training has ended;
            afterwards every rank has the same model. None if the models never differ.

    A sharded model is a `mechanisms.divided.DividedModule`. If the ranks have
    different optimizer states, the optimizer has a method `whole_states(model)`. It
    returns two objects with a state: one has the models of all ranks, the other has
    their optimizers.
    """

    wrap: Wrap = unchanged
    optimizer: MakeOptimizer | None = None
    states: Callable[[nn.Module], Mapping[str, HasState]] = lambda model: {}
    finish: Callable[[nn.Module], None] | None = None
