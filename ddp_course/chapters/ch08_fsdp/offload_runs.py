"""Timed steps with parameters, gradients and states on device or host. Chapter 08."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_course import theory
from ddp_course.chapters.ch08_fsdp.imagined_gpu import gpt_on_an_imagined_gpu
from ddp_course.data import load_corpus
from ddp_course.mechanisms.host_memory import HostMemory
from ddp_course.model import build_gpt
from ddp_course.zero import (
    FullyShardedDataParallel,
    OffloadedOptimizer,
    full_state_dict,
    metered,
    offloaded,
)
from ddp_course.zero.units import unit_plan

STEPS = 2
ADAMW = {"lr": 3e-4, "fused": True}
Trained = tuple[nn.Module, Any]


class OffloadRun(NamedTuple):
    """A rank's results of `STEPS` steps.

    Attributes:
        seconds: the seconds of the shortest step.
        fetched, stored: bytes copied from and to the host, per step.
        state: the parameters after the last step.
    """

    seconds: float
    fetched: float
    stored: float
    state: dict[str, Tensor]


def on_the_gpu(gpt: nn.Module, host: HostMemory) -> Trained:
    """Return stage 3 with everything on the device."""
    return _stepped(FullyShardedDataParallel(gpt, **metered.module()))


def on_the_host(gpt: nn.Module, host: HostMemory, prefetch: int) -> Trained:
    """Return stage 3 with shards, gradients and states on the host."""
    options = {"prefetch": prefetch, **offloaded.module(host)}
    return _stepped(FullyShardedDataParallel(gpt, **options))


def zero_offload(gpt: nn.Module, host: HostMemory) -> Trained:
    """Return a model on the device, and an optimizer on the host."""
    return gpt, OffloadedOptimizer(gpt.parameters(), torch.optim.AdamW, host, **ADAMW)


WAYS: dict[str, Callable[[nn.Module, HostMemory], Trained]] = {
    "all on the GPU": on_the_gpu,
    "nothing ahead": partial(on_the_host, prefetch=0),
    "one unit ahead": partial(on_the_host, prefetch=1),
    "ZeRO-Offload": zero_offload,
}


def run_each() -> dict[str, OffloadRun]:
    """Train for STEPS steps in each of WAYS, on one rank with an imagined GPU."""
    return {name: _run(make) for name, make in WAYS.items()}


def _run(make: Callable[[nn.Module, HostMemory], Trained]) -> OffloadRun:
    host, seconds = HostMemory(), []
    model, optimizer = make(gpt_on_an_imagined_gpu(), host)
    for k in range(STEPS):
        x, y = load_corpus().batch(k, 2, 16)
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(x, y)[1].backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    moved = [lane.nbytes / STEPS for lane in (host.to_device, host.to_host)]
    divided = isinstance(model, FullyShardedDataParallel)
    whole = full_state_dict(model) if divided else model.state_dict()
    return OffloadRun(min(seconds), *moved, whole)


def _stepped(fsdp: nn.Module) -> Trained:
    return fsdp, torch.optim.AdamW(fsdp.parameters(), **ADAMW)


def seconds_by_formula(on_the_gpu: float, bandwidth: float) -> dict[str, float]:
    """Return {way: seconds of a step, as `theory` predicts}, without the first way.

    Args:
        on_the_gpu: measured seconds of a step with everything on the device; a third of
            them is forward, and the rest backward.
        bandwidth: bytes per second of the link to the host.
    """
    root, *blocks = unit_plan(build_gpt("1m"), world_size=1)
    copy, root_copy = blocks[0].nbytes / bandwidth, root.nbytes / bandwidth
    each = on_the_gpu / len(blocks)
    passes = len(blocks), copy, each / 3, each * 2 / 3
    stage3 = partial(theory.offloaded_step_time, *passes, root_copy=root_copy)
    return {
        "nothing ahead": stage3(prefetch=False),
        "one unit ahead": stage3(prefetch=True),
        "ZeRO-Offload": theory.zero_offload_step_time(*passes, root_copy=root_copy),
    }
