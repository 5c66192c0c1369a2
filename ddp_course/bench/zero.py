"""A training step under our ZeRO and under PyTorch's, in one run.

Stages 1 and 2 are compared with PyTorch's ZeroRedundancyOptimizer (ZRO) under DDP;
stage 3 with `fully_shard` of every block and of the model, which leaves the root
unsharded after forward, as ours does. The peak memory of a step is compared, too.
Chapters 07 and 08.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as PyTorchZeRO
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP
from torch.optim import AdamW, Optimizer

from ddp_course.bench import steps
from ddp_course.bench.turns import Pair, Row, against, row
from ddp_course.measure import MemoryLog
from ddp_course.zero import (
    FullyShardedDataParallel,
    ShardedGradientOptimizer,
    ZeroRedundancyOptimizer,
)

ABOUT = "A step under our ZeRO beside ZeroRedundancyOptimizer (ZRO) and fully_shard."


# ---- PyTorch's -----------------------------------------------------------------------


def zero_default(model: nn.Module) -> steps.Parallelized:
    """Return DDP and ZeroRedundancyOptimizer as PyTorch's documentation uses them."""
    replica = PyTorchDDP(model)
    return replica, PyTorchZeRO(replica.parameters(), AdamW, lr=steps.ADAMW["lr"])


def zero_best(model: nn.Module) -> steps.Parallelized:
    """Return DDP and ZeroRedundancyOptimizer with all options that make them faster."""
    replica = PyTorchDDP(model, static_graph=True, gradient_as_bucket_view=True)
    options = steps.ADAMW | {"parameters_as_bucket_view": True}
    return replica, PyTorchZeRO(replica.parameters(), AdamW, **options)


def fully_sharded(
    model: nn.Module, best: bool = True, reshard_after_forward: bool | None = None
) -> steps.Parallelized:
    """Return the model with PyTorch's fully_shard on every block and on the rest."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    if best:
        blocks = list(model.blocks)
        for block, after in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
    return model, AdamW(model.parameters(), **steps.ADAMW | {"fused": best})


# ---- ours ----------------------------------------------------------------------------


def stages_1_and_2(model: nn.Module, kind: type[Optimizer]) -> steps.Parallelized:
    """Return the model, and an optimizer that shards states (and gradients)."""
    return model, kind(model.parameters(), AdamW, **steps.ADAMW)


def stage3(
    model: nn.Module, reshard_after_forward: bool | None = None
) -> steps.Parallelized:
    """Return the sharded model, and a plain optimizer of its shards."""
    sharded = FullyShardedDataParallel(
        model, reshard_after_forward=reshard_after_forward
    )
    return steps.with_adamw(sharded)


def bound(model: nn.Module) -> steps.Parallelized:
    """Return the model, and an optimizer of about 1/N of its parameters.

    The ranks do not communicate, so no ZeRO can be faster.
    """
    parameters = list(model.parameters())
    enough = sum(p.numel() for p in parameters) / dist.get_world_size()
    taken: list[nn.Parameter] = []
    while sum(p.numel() for p in taken) < enough:
        taken.append(parameters[len(taken)])
    return model, AdamW(taken, **steps.ADAMW)


# ---- the comparisons -----------------------------------------------------------------

STAGES_1_AND_2: dict[str, steps.Variant] = {
    "ZRO default": zero_default,
    "ZRO again": zero_default,  # shows the noise
    "ZRO best": zero_best,
    "zero1 gloo": partial(stages_1_and_2, kind=ZeroRedundancyOptimizer),
    "zero2 gloo": partial(stages_1_and_2, kind=ShardedGradientOptimizer),
    "bound": bound,
}
STAGE_3: dict[str, steps.Variant] = {
    "fully_shard default": partial(fully_sharded, best=False),
    "fully_shard again": partial(fully_sharded, best=False),
    "fully_shard best": fully_sharded,  # fused AdamW and prefetching of blocks
    "fully_shard patient": partial(steps.patiently, make=fully_sharded),
    "fully_shard kept": partial(fully_sharded, reshard_after_forward=False),
    "zero3 gloo": stage3,
    "zero3 gloo kept": partial(stage3, reshard_after_forward=False),
    "bound": bound,
}
BEST = "fully_shard best"
OURS = dict.fromkeys(("zero1 gloo", "zero2 gloo"))
TIMES = (
    *against("ZRO default", {"ZRO again": None, "ZRO best": None, **OURS}),
    *against("ZRO best", {"bound": None, **OURS, "zero1 gloo": 1}),
    *against("fully_shard default", dict.fromkeys(("fully_shard again", BEST))),
    *against("fully_shard default", {"zero3 gloo": None}),
    *against(BEST, {"bound": None, "fully_shard patient": None}),
    *against(BEST, {"zero3 gloo": {128: 0.6, 1024: 0.87}}),
    *against("fully_shard kept", {"zero3 gloo kept": None}),
)
PEAKS = tuple(
    Pair(f"peak of {own}", theirs, at_most=1.05, title=own, over="peak of PyTorch's")
    for own, theirs in (("zero3 gloo", BEST), ("zero3 gloo kept", "fully_shard kept"))
)
PAIRS = (*TIMES, *PEAKS)


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row of time for each case and pair; then rows of peak memory."""
    yield from steps.contest(quick, STAGES_1_AND_2, TIMES, sharing=2)
    yield from steps.contest(quick, STAGE_3, TIMES, sharing=2)
    for case in steps.cases(quick):
        yield from peak_rows(case, steps.on_ranks(case.ranks, peaks, case))


# ---- memory --------------------------------------------------------------------------


def peaks(case: steps.Case) -> dict[str, int]:
    """Return the peak bytes of a step's storages, by variant; all ranks call it.

    Measured in the third step (`measure.memory_log`).
    """
    both = [name for p in PEAKS for name in (p.title, p.denominator)]
    return {name: _peak(STAGE_3[name], case) for name in both}


def _peak(make: steps.Variant, case: steps.Case) -> int:
    parallelized: list[Any] = []

    def build(model: nn.Module) -> steps.Parallelized:
        parallelized.extend(make(model))
        return parallelized[0], parallelized[1]

    step = steps.step_of(build, case)
    with MemoryLog(*parallelized) as log:  # before `fully_shard` allocates its buffers
        for _ in range(2):
            step()
        begin = time.perf_counter()
        step()
    return max(m.ledger.total for m in log.moments if m.time >= begin)


def peak_rows(case: steps.Case, peaks_by_rank: list[dict[str, int]]) -> Iterator[Row]:
    """Yield the rows of one case, from the rank with the highest peak."""
    for pair in PEAKS:
        both = pair.title, pair.denominator
        peaks = (max(rank[name] for rank in peaks_by_rank) for name in both)
        yield row(str(case), pair, "bytes", *peaks, **case.fields)
