"""Chapter 05."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn


def my_bucket_plan(
    parameters: list[tuple[str, Tensor]], cap: int, first: int
) -> list[list[str]]:
    """Return the buckets: the last registered first, one type each, `first` smaller."""
    once: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.numel():
            once.setdefault(id(parameter), (name, parameter))
    filling: dict[torch.dtype, list] = {}  # the open bucket of each type
    limit: dict[torch.dtype, int] = {}  # at which it is closed
    closed = []
    for place, (name, parameter) in enumerate(reversed(once.values())):
        dtype = parameter.dtype
        filling.setdefault(dtype, []).append((place, name, parameter.nbytes))
        if sum(n for _, _, n in filling[dtype]) >= limit.get(dtype, min(first, cap)):
            closed.append(filling.pop(dtype))
            limit[dtype] = cap
    closed += filling.values()  # buckets that did not reach their cap
    closed.sort(key=lambda bucket: bucket[-1][0])  # by the last gradient's place
    return [[name for _, name, _ in bucket] for bucket in closed]


def mini_ddp(
    buckets: list[list[Tensor]],
    launch: Callable[[Tensor], dist.Work],
    at_the_end: Callable[[Callable[[], None]], None],
) -> None:
    """Average gradients in every backward: each bucket leaves when it is its turn."""
    n = dist.get_world_size()
    full = [len(members) for members in buckets]
    missing = list(full)
    under_way: list[tuple[Tensor, dist.Work]] = []

    def gradient_is_there(k: int) -> None:
        if missing == full:  # the first one of this backward
            at_the_end(finish)
        missing[k] -= 1
        while len(under_way) < len(buckets) and missing[len(under_way)] == 0:
            members = buckets[len(under_way)]
            flat = torch.cat([p.grad.flatten() for p in members])
            under_way.append((flat, launch(flat)))

    def finish() -> None:
        for members, (flat, handle) in zip(buckets, under_way, strict=True):
            handle.wait()
            means = (flat / n).split([p.numel() for p in members])
            for parameter, mean in zip(members, means, strict=True):
                parameter.grad.copy_(mean.view_as(parameter))
        under_way.clear()
        missing[:] = full

    for k, members in enumerate(buckets):
        for parameter in members:
            parameter.register_post_accumulate_grad_hook(
                lambda _, k=k: gradient_is_there(k)
            )


def accumulate(ddp: nn.Module, microbatches: list[tuple[Tensor, Tensor]]) -> None:
    """Add up the gradients of all microbatches; only the last one is averaged."""
    rows = sum(len(x) for x, _ in microbatches)
    for x, y in microbatches[:-1]:
        with ddp.no_sync():  # the forward, too
            (ddp(x, y) * len(x) / rows).backward()
    x, y = microbatches[-1]
    (ddp(x, y) * len(x) / rows).backward()
