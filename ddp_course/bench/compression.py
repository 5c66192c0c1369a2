"""A training step that sends fewer bytes, compared with a step of our plain DDP.

Four ranks with links of 100 MB/s each: a step waits for its bytes, and a compressor
must save more of that wait than it computes. "Alone" sends nothing: no method can be
faster. So a method is judged by the communication that it exposes: the time of its step
minus the time of a step of "alone". Local SGD and DiLoCo average after every 8 steps;
the time of a step is an eighth of such a round. Then, without slow links, where
compression only costs time, our hooks are compared with PyTorch's. Chapter 14.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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
from ddp_course.bench.turns import (
    Contender,
    Pair,
    Row,
    Timings,
    against,
    row,
    rows_of,
    slowest,
)
from ddp_course.collectives import ring_all_reduce
from ddp_course.compression import CourseExchange, compress, compressor
from ddp_course.data_parallel import DistributedDataParallel
from ddp_course.launch import Link, Links
from ddp_course.local_sgd import DiLoCo, LocalSGD
from ddp_course.spec import COMPRESSORS

ABOUT = "A training step with compressed gradients, over links of 100 MB/s and without."
ONE_BUCKET = {"bucket_cap_mb": 100, "first_bucket_mb": 100}
LINKS = Links(inside=Link(latency=50e-6, bandwidth=100e6))


def hooked(
    model: nn.Module, state: Callable[[], Any], hook: Callable
) -> steps.Parallelized:
    """Return the model under our DDP, with a hook and one bucket.

    Compressed messages are so short that latency decides: a step is faster with fewer
    messages, though none is sent during backward. And with two buckets, PyTorch's
    PowerSGD starts collectives in gloo's threads in an order that may differ between
    ranks: the ranks then hang, or abort.
    """
    ddp = DistributedDataParallel(model, **ONE_BUCKET)
    ddp.register_comm_hook(state(), hook)
    return steps.with_adamw(ddp)


def our_variant(words: str, all_reduce: Callable) -> steps.Variant:
    """Return a variant with one of our compressors."""
    state = partial(compressor, words, CourseExchange(all_reduce=all_reduce))
    return partial(hooked, state=state, hook=compress)


def our_ddp(model: nn.Module) -> steps.Parallelized:
    """Return the model under our DDP, over this course's ring."""
    return steps.with_adamw(DistributedDataParallel(model, all_reduce=ring_all_reduce))


def meet_rarely(cls: type[LocalSGD], model: nn.Module) -> steps.Parallelized:
    """Return the model, and an optimizer that averages after every H steps."""
    model, optimizer = steps.with_adamw(model)
    return model, cls(optimizer, model, H, all_reduce=ring_all_reduce)


H = 8
LOCAL = {
    "local": partial(meet_rarely, LocalSGD),
    "diloco": partial(meet_rarely, DiLoCo),
}
METHODS = [
    name if amount is None else f"{name}:{amount.example}"
    for name, amount in COMPRESSORS.items()
    if name != "bf16"  # it sends as many bytes as fp16
]
METHODS += ["powersgd:1"]
SLOW: dict[str, steps.Variant] = {"ddp": our_ddp, "again": our_ddp}
SLOW |= {"alone": steps.with_adamw, **LOCAL}
SLOW |= {words: our_variant(words, ring_all_reduce) for words in METHODS}
power = partial(PowerSGDState, None, 4, start_powerSGD_iter=2)
FAST: dict[str, steps.Variant] = {
    "torch fp16": partial(hooked, state=lambda: None, hook=fp16_compress_hook),
    "our fp16": our_variant("fp16", dist.all_reduce),
    "torch powersgd": partial(hooked, state=power, hook=powerSGD_hook),
    "our powersgd": our_variant("powersgd:4", dist.all_reduce),
}
EXPOSED = tuple(
    Pair(words, "ddp - alone", at_most, over="the communication that ddp exposes")
    for words, at_most in (dict.fromkeys(METHODS) | {"int8": 0.45}).items()
)
PAIRS = (
    *EXPOSED,
    *against("ddp", dict.fromkeys(METHODS)),
    *against("ddp", {"local": None, "diloco": 0.3, "alone": None, "again": None}),
    *against("torch fp16", {"our fp16": 1.05}),
    *against("torch powersgd", {"our powersgd": 1.05}),
)


def bench(quick: bool) -> Iterator[Row]:
    """Yield the rows measured over slow links, then the rows measured without."""
    case = steps.Case(4, "1m", 128, 5 if quick else 20)
    seconds = steps.BUDGET[quick] / 2
    for variants, links in ((SLOW, LINKS), (FAST, None)):
        how = variants, case, seconds, of_round
        timings = steps.on_ranks(4, steps.measure, *how, links=links)
        words = f"{case}, {'100 MB/s' if links else 'no slow links'}"
        yield from rows_of(words, PAIRS, timings, **case.fields)
        if links:
            yield from exposed_rows(words, timings, **case.fields)


def exposed_rows(case: str, timings: Sequence[Timings], **fields: Any) -> Iterator[Row]:
    """Yield the rows of exposed communication: (t - t_alone) / (t_ddp - t_alone)."""
    times, others = slowest(timings)
    waits = {
        name: [t - alone for t, alone in zip(times[name], times["alone"], strict=True)]
        for name in ("ddp", *METHODS)
    }
    for pair in EXPOSED:
        both = waits[pair.variant], waits["ddp"]
        paired = statistics.median(a / b for a, b in zip(*both, strict=True))
        more = {"paired": paired, "turns": len(both[0]), "others": others}
        medians = map(statistics.median, both)
        yield row(case, pair, "seconds", *medians, **fields, **more)


def of_round(name: str, step: Contender) -> Contender:
    """Return the function to measure: for local methods, a round of H steps."""
    return partial(mean_of_round, step) if name in LOCAL else step


def mean_of_round(step: Contender) -> float:
    """Run H steps; return the mean seconds of a step."""
    start = time.perf_counter()
    for _ in range(H):
        step()
    return (time.perf_counter() - start) / H
