"""A parameter server in a few lines: it serves workers in the order of arrival.

    server    [weights] ---------.   .-> [step] ---.   .-> [step]
                         weights |       gradient  | weights
    worker                       `-> [forward, backward] ----'

No worker waits for another one. `dist.recv` without a rank receives from any rank; gloo
supports that, NCCL does not. Chapter 13.
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
    """Step with each of `pushes` gradients; return their senders, in order.

    Rank 0 calls it. `pushes` is the number of gradients of all workers together.
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
    """Pull, call `backward(k)` and push, `pushes` times; ranks 1, 2, ... call it."""
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
