"""Local SGD, the loop: H local steps, then the mean of the parameters. Chapter 14."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer


def train_locally(
    model: nn.Module,
    optimizer: Optimizer,
    loss: Callable[[nn.Module, int], Tensor],
    steps: int,
    every: int,
) -> None:
    """Train with this rank's `loss(model, step)`; average after every `every` steps.

    All ranks must begin with the same model.
    """
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()  # with this rank's gradient alone
        if (step + 1) % every == 0:
            average(model)


@torch.no_grad()
def average(model: nn.Module) -> None:
    """Replace all parameters with their mean over the ranks."""
    mean = parameters_to_vector(model.parameters())
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    vector_to_parameters(mean, model.parameters())
