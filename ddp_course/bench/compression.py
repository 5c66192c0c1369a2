"""A training step that sends gradients in fewer bytes, over one of our plain DDP.

Four ranks with links of 100 MB/s each: a step waits for its bytes, and a compressor
must save more of that wait than it computes. "Alone" sends nothing: no method can be
faster. Local SGD and DiLoCo average after 8 steps, and a step is an eighth of that
round. Then the same without slow links, where compression only costs time: our hooks
beside PyTorch's, on the same DDP. Chapter 14.
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
) -> steps.Parallelized:
    """Return the model under our DDP, with a hook; by default in one bucket.

    With two buckets, PyTorch's PowerSGD starts collectives in gloo's threads in an
    order that may differ between ranks: they hang, or abort.
    """
    ddp = DistributedDataParallel(model, **caps)
    ddp.register_comm_hook(state(), hook)
    return steps.with_adamw(ddp)


def our_variant(words: str, all_reduce: Callable, **caps: Any) -> steps.Variant:
    """Return a variant with one of our compressors."""
    state = partial(compressor, words, CourseExchange(all_reduce=all_reduce))
    return partial(hooked, state=state, hook=compress, **caps)


def our_variant_in_backward(words: str) -> steps.Variant:
    """Return a variant over our ring that compresses DDP's buckets during backward.

    PowerSGD has one bucket: the time of its short messages is nearly all latency.
    """
    return our_variant(
        words, ring_all_reduce, caps=ONE_BUCKET if "powersgd" in words else {}
    )


def our_ddp(model: nn.Module) -> steps.Parallelized:
    """Return the model under our DDP, over this course's ring."""
    return steps.with_adamw(DistributedDataParallel(model, all_reduce=ring_all_reduce))


def meet_rarely(cls: type[LocalSGD], model: nn.Module) -> steps.Parallelized:
    """Return the model, and an optimizer that averages after H steps."""
    model, optimizer = steps.with_adamw(model)
    return model, cls(optimizer, model, H, all_reduce=ring_all_reduce)


H = 8
LOCAL = {
    "local": partial(meet_rarely, LocalSGD),
    "diloco": partial(meet_rarely, DiLoCo),
}
BARS = {"fp16": 0.6, "int8": 0.4, "powersgd:4": 0.3}
ALSO = ("sign", "topk:0.01", "randomk:0.01", "powersgd:1")
SLOW: dict[str, steps.Variant] = {"ddp": our_ddp, "again": our_ddp}
SLOW |= {"alone": steps.with_adamw, **LOCAL}
SLOW |= {words: our_variant_in_backward(words) for words in (*BARS, *ALSO)}
power = partial(PowerSGDState, None, 4, start_powerSGD_iter=2)
FAST: dict[str, steps.Variant] = {
    "torch fp16": partial(hooked, state=lambda: None, hook=fp16_compress_hook),
    "our fp16": our_variant("fp16", dist.all_reduce),
    "torch powersgd": partial(hooked, state=power, hook=powerSGD_hook),
    "our powersgd": our_variant("powersgd:4", dist.all_reduce),
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
        timings = steps.on_ranks(4, steps.measure, *how, links=links)
        words = f"{case}, {'100 MB/s' if links else 'no slow links'}"
        yield from rows_of(words, PAIRS, timings, **case.fields)


def of_round(name: str, step: Contender) -> Contender:
    """Return the function to measure: for local methods, a round of H steps."""
    return partial(mean_of_round, step) if name in LOCAL else step


def mean_of_round(step: Contender) -> float:
    """Run H steps; return the seconds of one."""
    start = time.perf_counter()
    for _ in range(H):
        step()
    return (time.perf_counter() - start) / H
