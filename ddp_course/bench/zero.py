"""A training step under our ZeRO and under PyTorch's, in one run.

The variants, each with a model and an optimizer of its own (`steps` measures them in
turns). Beside PyTorch's ZeroRedundancyOptimizer, with DDP:

    ZRO default   as it is
    ZRO again     the same once more: how much of a difference is noise
    ZRO best      with the parameters in buckets and the fused AdamW, and around the
                  model a DDP with static_graph and gradient_as_bucket_view
    zero1 gloo, zero2 gloo
                  our stages 1 and 2 over gloo, with the fused AdamW
    zero1 shared, zero2 shared
                  the same with buckets in shared memory
    bound         no communication at all, and an optimizer of 1/N of the parameters

Beside PyTorch's fully_shard, of every block and then of the model:

    fully_shard default
                  as it is; it leaves the root unsharded after forward, and so do ours
    fully_shard again
                  the same once more
    fully_shard best
                  with the fused AdamW, and told which block comes next
    fully_shard patient
                  the same, while gloo's threads interrupt nobody, as in our stage 3
                  (`collectives.patience`): how much of our gain that is
    fully_shard kept
                  as best, and nothing is resharded after forward
    zero3 gloo, zero3 shared
                  our stage 3 over gloo and in shared memory, with the fused AdamW
    zero3 gloo kept, zero3 shared kept
                  the same, and nothing is resharded after forward
    bound         as above

and the most memory that a step needs under `fully_shard` and under ours. Chapters 07
and 08.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as PyTorchZeRO
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP
from torch.optim import AdamW, Optimizer

from ddp_course.bench import steps
from ddp_course.bench.rows import Row, row
from ddp_course.collectives import communicator
from ddp_course.collectives.patience import patient
from ddp_course.measure import MemoryLog
from ddp_course.model import GPTConfig
from ddp_course.zero import (
    FullyShardedDataParallel,
    ShardedGradientOptimizer,
    ZeroRedundancyOptimizer,
)

Made = tuple[nn.Module, Optimizer]
LR = 1e-4


# ---- PyTorch's -----------------------------------------------------------------------


def zero_default(model: nn.Module) -> Made:
    """Return DDP and ZeroRedundancyOptimizer as the documentation has them."""
    replica = PyTorchDDP(model)
    return replica, PyTorchZeRO(replica.parameters(), AdamW, lr=LR)


def zero_best(model: nn.Module) -> Made:
    """Return both with everything that makes them faster."""
    replica = PyTorchDDP(model, static_graph=True, gradient_as_bucket_view=True)
    optimizer = PyTorchZeRO(
        replica.parameters(), AdamW, parameters_as_bucket_view=True, lr=LR, fused=True
    )
    return replica, optimizer


def fully_sharded(
    model: nn.Module, best: bool = True, reshard_after_forward: bool | None = None
) -> Made:
    """Return PyTorch's fully_shard of every block, and of the rest."""
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard_after_forward)
    fully_shard(model, reshard_after_forward=reshard_after_forward)
    if best:
        blocks = list(model.blocks)
        for block, after in zip(blocks, blocks[1:], strict=False):
            block.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([block])
    return model, AdamW(model.parameters(), lr=LR, **({"fused": True} if best else {}))


def fully_sharded_patiently(model: nn.Module) -> Made:
    """Return `fully_shard` at its best; in a step gloo's threads interrupt nobody."""
    sharded, optimizer = fully_sharded(model)
    threads, patience = communicator().threads, ExitStack()
    sharded.register_forward_pre_hook(
        lambda *_: patience.enter_context(patient(threads)), prepend=True
    )
    optimizer.register_step_pre_hook(lambda *_: patience.close())
    return sharded, optimizer


# ---- ours ----------------------------------------------------------------------------


def stage1(model: nn.Module, shared: bool = False) -> Made:
    """Return the model as it is, and the optimizer that shards its states."""
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), AdamW, buckets_in_shared_memory=shared, lr=LR, fused=True
    )
    return model, optimizer


def stage2(model: nn.Module, shared: bool = False) -> Made:
    """Return the model as it is, and the optimizer that shards gradients, too."""
    optimizer = ShardedGradientOptimizer(
        model.parameters(), AdamW, buckets_in_shared_memory=shared, lr=LR, fused=True
    )
    return model, optimizer


def stage3(
    model: nn.Module,
    shared: bool = False,
    reshard_after_forward: bool | None = None,
) -> Made:
    """Return the sharded model, and a plain optimizer of its shards."""
    sharded = FullyShardedDataParallel(
        model, reshard_after_forward=reshard_after_forward, in_shared_memory=shared
    )
    return sharded, AdamW(sharded.parameters(), lr=LR, fused=True)


def bound(model: nn.Module) -> Made:
    """Return the model as it is, and an optimizer of about 1/N of its parameters."""
    parameters = list(model.parameters())
    enough = sum(p.numel() for p in parameters) / dist.get_world_size()
    taken: list[nn.Parameter] = []
    while sum(p.numel() for p in taken) < enough:
        taken.append(parameters[len(taken)])
    return model, AdamW(taken, lr=LR, fused=True)


# ---- which are compared --------------------------------------------------------------

STAGES_1_AND_2: dict[str, steps.Variant] = {
    "ZRO default": zero_default,
    "ZRO again": zero_default,
    "ZRO best": zero_best,
    "zero1 gloo": stage1,
    "zero1 shared": partial(stage1, shared=True),
    "zero2 gloo": stage2,
    "zero2 shared": partial(stage2, shared=True),
    "bound": bound,
}
STAGE_3: dict[str, steps.Variant] = {
    "fully_shard default": partial(fully_sharded, best=False),
    "fully_shard again": partial(fully_sharded, best=False),
    "fully_shard best": fully_sharded,
    "fully_shard patient": fully_sharded_patiently,
    "fully_shard kept": partial(fully_sharded, reshard_after_forward=False),
    "zero3 gloo": stage3,
    "zero3 shared": partial(stage3, shared=True),
    "zero3 gloo kept": partial(stage3, reshard_after_forward=False),
    "zero3 shared kept": partial(stage3, shared=True, reshard_after_forward=False),
    "bound": bound,
}
CONTESTS = {"ZRO": STAGES_1_AND_2, "fully_shard": STAGE_3}


def compared(theirs: str) -> dict[str, tuple[str, ...]]:
    """Return beside which of `theirs` each variant is laid."""
    default, best = f"{theirs} default", f"{theirs} best"
    pairs = {f"{theirs} again": (default,), best: (default,), "bound": (best,)}
    for name in CONTESTS[theirs]:
        if name.endswith(" kept") and not name.startswith(theirs):
            pairs[name] = (f"{theirs} kept",)
        elif name.startswith("zero"):
            pairs[name] = (default, best)
        elif name.endswith(" patient"):
            pairs[name] = (best,)
    return pairs


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each number of ranks, preset, number of tokens and variant."""
    for ranks, name, preset, tokens, turns in steps.cases(quick):
        for theirs in CONTESTS:
            told = steps.on_ranks(ranks, measure, theirs, preset, tokens, turns)
            pairs = compared(theirs)
            yield from steps.rows_of("zero", pairs, ranks, name, tokens, told)
        told = steps.on_ranks(ranks, peaks, preset, tokens)
        yield from peak_rows(ranks, name, tokens, told)


def measure(
    theirs: str, preset: str | GPTConfig, tokens: int, turns: int
) -> steps.Told:
    """On every rank: return seconds per step, by variant and turn, and `Others`."""
    return steps.measure(CONTESTS[theirs], preset, tokens, turns)


# ---- memory --------------------------------------------------------------------------


PEAKS = {
    "zero3 gloo": "fully_shard best",
    "zero3 gloo kept": "fully_shard kept",
}


def peaks(preset: str | GPTConfig, tokens: int) -> dict[str, int]:
    """On every rank: return the most bytes that a step has alive, by variant.

    Counted from storages (`measure.memory_log`), in the third step.
    """
    names = [*PEAKS, *PEAKS.values()]
    return {name: _peak(STAGE_3[name], preset, tokens) for name in names}


def _peak(make: steps.Variant, preset: str | GPTConfig, tokens: int) -> int:
    made: list[Any] = []

    def noted(model: nn.Module) -> Made:
        made.extend(make(model))
        return made[0], made[1]

    step = steps.step_of(noted, preset, tokens)
    with MemoryLog(*made) as log:  # open when `fully_shard` makes its buffers
        for _ in range(2):
            step()
        begin = time.perf_counter()
        step()
    return max(m.ledger.total for m in log.moments if m.time >= begin)


def peak_rows(
    ranks: int, preset: str, tokens: int, told: list[dict[str, int]]
) -> Iterator[Row]:
    """Yield the rows of one case: the rank that needs most counts."""
    for ours, theirs in PEAKS.items():
        most = {name: max(rank[name] for rank in told) for name in (ours, theirs)}
        yield row(
            "zero",
            f"{ranks} ranks, {preset}, {tokens} tokens, peak of {ours} beside {theirs}",
            "bytes",
            most[ours],
            most[theirs],
            ranks=ranks,
            preset=preset,
            tokens=tokens,
            variant=f"peak of {ours}",
            beside=theirs,
        )
