"""A parameter server in a few lines: whoever comes next is served next.

    server    [weights] ---------.   .-> [step] ---.   .-> [step]
                         weights |       gradient  | weights
    worker                       `-> [forward, backward] ----'

Nobody waits for another worker. `dist.recv` without a rank receives from any rank,
which gloo has and NCCL has not. Chapter 13.
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer


@torch.no_grad()
def serve(
    params: Iterable[nn.Parameter], optimizer: Optimizer, pushes: int
) -> list[int]:
    """On rank 0: step with each of `pushes` gradients; return who sent them, in order.

    All workers together push so many.
    """
    params, senders = list(params), []
    gradient = torch.empty_like(parameters_to_vector(params))
    for worker in range(1, dist.get_world_size()):
        dist.send(parameters_to_vector(params), worker)
    for _ in range(pushes):
        worker = dist.recv(gradient)  # from whichever worker comes next
        parts = gradient.split([p.numel() for p in params])
        for parameter, part in zip(params, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        dist.send(parameters_to_vector(params), worker)
        senders.append(worker)
    return senders


def work(
    params: Iterable[nn.Parameter], backward: Callable[[int], object], pushes: int
) -> None:
    """On the other ranks: pull, call `backward(k)`, push; `pushes` times."""
    params = list(params)
    weights = torch.empty_like(parameters_to_vector(params).detach())
    for k in range(pushes + 1):
        dist.recv(weights, 0)
        vector_to_parameters(weights, params)
        if k < pushes:
            backward(k)
            dist.send(parameters_to_vector([p.grad for p in params]), 0)
            for parameter in params:
                parameter.grad = None
