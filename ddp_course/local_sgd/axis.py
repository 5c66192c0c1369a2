"""The local steps of a layout: an AdamW that averages parameters. Chapter 14."""

import torch
from torch import nn
from torch.optim import AdamW

from ddp_course.local_sgd.local import LocalSteps, means
from ddp_course.local_sgd.local_sgd import DiLoCo, LocalSGD
from ddp_course.mesh import Axes
from ddp_course.spec import Layout
from ddp_course.strategy import Strategy


def local_adamw(
    model: nn.Module, layout: Layout, axes: Axes | None, lr: float
) -> LocalSteps:
    """Return an AdamW with the local steps and averages that the layout names."""
    kind = DiLoCo if "lr" in layout.local else LocalSGD
    return kind(AdamW(model.parameters(), lr=lr), model, **layout.local)


@torch.no_grad()
def finish(model: nn.Module) -> None:
    """Replace the parameters of all ranks with their mean."""
    parameters = list(model.parameters())
    for parameter, mean in zip(parameters, means(parameters), strict=True):
        parameter.copy_(mean)


def strategy(layout: Layout) -> Strategy:
    """Return the functions that set up local steps for this layout."""
    return Strategy(optimizer=local_adamw, finish=finish)
