"""What is left to do with gradients when the last backward is through.

A parameter that is used on two ranks has half of its gradient on each: their sum is its
gradient. If there are several pipelines, each with its own part of the batch, gradients
are averaged over them. And the norm of all is not the sum of the ranks' norms, but the
squares can be added. Chapter 10.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from ddp_course.collectives.port import Port
from ddp_course.mechanisms.norm import total_norm


class SharedGradients:
    """Sums the gradients of parameters that several ranks use, over these ranks.

    Every rank sends its part to each of the others, and all add in the order of the
    ranks: they get the same bits, and what was equal before a step is equal after it.
    Bytes sent by each of k ranks: k - 1 times the gradient's.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shared: Mapping[str, Sequence[int]],
        rank: int,
    ) -> None:
        self.rank = rank
        self.held = {
            parameters[name]: list(ranks)
            for name, ranks in shared.items()
            if rank in ranks and parameters[name].requires_grad
        }
        self.before: dict[nn.Parameter, Tensor | None] = {}

    def begin(self) -> None:
        """Put aside what is there: it has been summed already."""
        self.before = {parameter: parameter.grad for parameter in self.held}
        for parameter in self.held:
            parameter.grad = None

    @torch.no_grad()
    def sum(self, port: Port) -> None:
        """Replace each gradient by its sum over the ranks, and add what was there."""
        for parameter, ranks in self.held.items():
            own = zeros_if_none(parameter).contiguous()
            parts = {r: own if r == self.rank else torch.empty_like(own) for r in ranks}
            others = [r for r in ranks if r != self.rank]
            port.exchange([(own, r) for r in others], [(parts[r], r) for r in others])
            parameter.grad = parts[ranks[0]].clone()
            for r in ranks[1:]:
                parameter.grad += parts[r]
            if self.before[parameter] is not None:
                parameter.grad += self.before[parameter]
        self.before = {}


def zeros_if_none(parameter: Tensor) -> Tensor:
    """Return a parameter's gradient; zeros if it has none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@torch.no_grad()
def average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace every gradient by its mean over `group`: one all-reduce for each type."""
    trained = [p for p in parameters if p.requires_grad and p.numel()]
    for dtype in dict.fromkeys(p.dtype for p in trained):
        members = [p for p in trained if p.dtype == dtype]
        flat = torch.cat([zeros_if_none(p).flatten() for p in members])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        parts = flat.split([p.numel() for p in members])
        for parameter, part in zip(members, parts, strict=True):
            parameter.grad = part.view(parameter.shape).clone()


@torch.no_grad()
def clip(
    parameters: Iterable[nn.Parameter],
    owned: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> Tensor:
    """Scale all gradients so that the norm of the whole model's is at most `max_norm`.

    `owned` are the parameters that count on this rank: each counts on one. Returns the
    norm before, the same on all ranks; ValueError for a `norm_type` not above 0.
    """
    norm = total_norm(owned, device, norm_type, group)
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.float()
