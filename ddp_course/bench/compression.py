"""A training step whose gradients travel in fewer bytes, over one of our plain DDP.

Four ranks whose links carry 100 MB/s each: a step waits for its bytes, and a compressor
must win more of that wait than it takes in computing. "Alone" sends nothing at all: no
method can be faster. Local SGD and DiLoCo meet after 8 steps, and a step is an eighth
of that round. Then the same without slow links, where compressing is all loss: our
hooks beside PyTorch's, on the same DDP. Chapter 14.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)

from ddp_course.bench import steps
from ddp_course.bench.turns import Contender, Row, against, rows_of
from ddp_course.collectives import ring_all_reduce
from ddp_course.compression import CourseExchange, compress, compressor
from ddp_course.data_parallel import DistributedDataParallel
from ddp_course.launch import Link, Links
from ddp_course.local_sgd import DiLoCo, LocalSGD

ABOUT = "A training step with compressed gradients, over links of 100 MB/s and without."
ONE_BUCKET = {"bucket_cap_mb": 100, "first_bucket_mb": 100}
LINKS = Links(inside=Link(latency=50e-6, bandwidth=100e6))


def hooked(
    model: nn.Module,
    state: Callable[[], Any],
    hook: Callable,
    caps: Mapping[str, float] = ONE_BUCKET,
) -> steps.Made:
    """Return the model under our DDP, with a hook; in one bucket, if not told other.

    With two, PyTorch's PowerSGD starts collectives in gloo's threads, on some ranks in
    another order: they hang, or end.
    """
    ddp = DistributedDataParallel(model, **caps)
    ddp.register_comm_hook(state(), hook)
    return steps.with_adamw(ddp)


def ours(words: str, all_reduce: Callable, **caps: Any) -> steps.Variant:
    """Return a variant with one of our compressors."""
    state = partial(compressor, words, CourseExchange(all_reduce=all_reduce))
    return partial(hooked, state=state, hook=compress, **caps)


def meanwhile(words: str) -> steps.Variant:
    """Return the same over our ring: while backward goes on, in the buckets of DDP.

    PowerSGD's in one: a message of so few bytes is nearly all latency.
    """
    return ours(words, ring_all_reduce, caps=ONE_BUCKET if "powersgd" in words else {})


def plain(model: nn.Module) -> steps.Made:
    """Return the model under our DDP, over this course's ring."""
    return steps.with_adamw(DistributedDataParallel(model, all_reduce=ring_all_reduce))


def local(cls: type[LocalSGD], model: nn.Module) -> steps.Made:
    """Return the model, and an optimizer that meets the others after H steps."""
    model, optimizer = steps.with_adamw(model)
    return model, cls(optimizer, model, H, all_reduce=ring_all_reduce)


H = 8
LOCAL = {"local": partial(local, LocalSGD), "diloco": partial(local, DiLoCo)}
BARS = {"fp16": 0.6, "int8": 0.4, "powersgd:4": 0.3}
ALSO = ("sign", "topk:0.01", "randomk:0.01", "powersgd:1")
SLOW: dict[str, steps.Variant] = {"ddp": plain, "again": plain}
SLOW |= {"alone": steps.with_adamw, **LOCAL}
SLOW |= {words: meanwhile(words) for words in (*BARS, *ALSO)}
power = partial(PowerSGDState, None, 4, start_powerSGD_iter=2)
FAST: dict[str, steps.Variant] = {
    "torch fp16": partial(hooked, state=lambda: None, hook=fp16_compress_hook),
    "our fp16": ours("fp16", dist.all_reduce),
    "torch powersgd": partial(hooked, state=power, hook=powerSGD_hook),
    "our powersgd": ours("powersgd:4", dist.all_reduce),
}
PAIRS = (
    *against("ddp", BARS | dict.fromkeys(ALSO)),
    *against("ddp", {"local": None, "diloco": 0.3, "alone": None, "again": None}),
    *against("torch fp16", {"our fp16": 1.05}),
    *against("torch powersgd", {"our powersgd": 1.05}),
)


def bench(quick: bool) -> Iterator[Row]:
    """Yield the rows of both contests."""
    case = steps.Case(4, "1m", 128, 5 if quick else 20)
    seconds = steps.BUDGET[quick] / 2
    for variants, links in ((SLOW, LINKS), (FAST, None)):
        how = variants, case, seconds, of_round
        told = steps.on_ranks(4, steps.measure, *how, links=links)
        words = f"{case}, {'100 MB/s' if links else 'no slow links'}"
        yield from rows_of(words, PAIRS, told, **case.fields)


def of_round(name: str, step: Contender) -> Contender:
    """Return what is measured: a round of H steps, if so many make one."""
    return partial(mean_of_round, step) if name in LOCAL else step


def mean_of_round(step: Contender) -> float:
    """Make H steps; return the seconds of one."""
    start = time.perf_counter()
    for _ in range(H):
        step()
    return (time.perf_counter() - start) / H
