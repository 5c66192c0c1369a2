"""Train the course's GPT: the same function for one process and for many.

    train()                                                  one process
    spawn(train, world_size=4)                               four, from a notebook
    torchrun --nproc-per-node 4 -m ddp_course.train          four, also on many machines
    ddp-course train --ranks 4                               four, on this machine

Every rank has a part of every batch, and the ranks average their gradients before each
step (chapter 00). Rows are shared equally and the loss is a mean, so the mean of the
ranks' gradients is the gradient of the whole batch.

How they average, and what of the model each of them keeps, is the strategy:
`STRATEGIES` names them. `parallelize` and `optimizer_for` are the only places of the
course where strategies meet.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.checkpoint import Checkpoints
from ddp_course.data import load_corpus, shard
from ddp_course.data_parallel import (
    DataParallel,
    DistributedDataParallel,
    FlatDistributedDataParallel,
    NaiveDistributedDataParallel,
)
from ddp_course.launch import device
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.zero import (
    FullyShardedDataParallel,
    ShardedGradientOptimizer,
    ZeroRedundancyOptimizer,
)

STRATEGIES = MappingProxyType(
    {
        "average": "one all-reduce per parameter, by the training loop, after backward",
        "dp": "one process, a thread for each replica",
        "naive": "one all-reduce per parameter, when backward is through",
        "flat": "one all-reduce for all parameters, when backward is through",
        "ddp": "all-reduces of buckets, while backward runs",
        "ddp-shared": "the same, with buckets in memory that all ranks see",
        "pytorch": "PyTorch's DistributedDataParallel",
        "zero1": "optimizer states are sharded",
        "zero2": "and gradients",
        "zero3": "and parameters: fully sharded data parallelism",
    }
)


@dataclass(frozen=True)
class History:
    """What a rank brings home from `train`.

    `losses[k]` is the loss over the global batch of step k, before the step, in nats
    per character. `checksum` is `checksum(state)` of the final parameters, and `state`
    holds them, on the CPU, if asked for. `resumed_at` is the number of steps that an
    earlier run had done, and `seconds` the wall time of the others.
    """

    losses: list[float]
    checksum: str
    seconds: float
    world_size: int
    resumed_at: int = 0
    state: dict[str, Tensor] | None = field(default=None, repr=False)


def train(
    steps: int = 20,
    batch_size: int = 8,
    preset: str | GPTConfig = "1m",
    lr: float = 3e-4,
    seed: int = 0,
    keep_state: bool = False,
    strategy: str = "average",
    replicas: int = 4,
    checkpoint: str | Path | None = None,
    every: int = 10,
    on_step: Callable[[int, float], None] | None = None,
) -> History:
    """Train a GPT for `steps` steps of AdamW on `batch_size` rows, shared by all ranks.

    Without a process group this is one process with the whole batch. `strategy` is a
    name of `STRATEGIES`; "dp" shares the rows among `replicas` threads. With a folder
    `checkpoint`, the run is saved after `every` so many steps and at its end, and goes
    on from the newest checkpoint in it. Rank 0 calls `on_step(steps done, loss)`.

    Raises ValueError, before any message, for what cannot be: rows that cannot be
    shared equally, a strategy that there is not. Chapters 00, 04 and 05.
    """
    together = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    my_device = device()
    check(steps, batch_size, strategy, replicas, world_size)
    corpus = load_corpus()
    model = build_gpt(preset, seed).to(my_device)  # the same weights on every rank
    parallel = parallelize(model, strategy, replicas)
    optimizer = optimizer_for(parallel, strategy, lr)
    whole_model, whole_optimizer = whole(model, parallel, optimizer)
    settings = {"batch_size": batch_size, "lr": lr, "seed": seed}
    settings |= asdict(model.config)
    checkpoints = Checkpoints(checkpoint, every, whole_model, whole_optimizer, settings)
    losses = checkpoints.load(steps)  # of the steps that are done
    resumed_at = len(losses)
    start = time.perf_counter()
    for step in range(resumed_at, steps):
        batch = corpus.batch(step, batch_size, model.config.block_size, seed)
        x, y = (shard(t, rank, world_size).to(my_device) for t in batch)  # (B/n, T)
        _, loss = parallel(x, y)
        loss = loss.mean()  # "dp" returns a loss for each of its replicas
        optimizer.zero_grad()
        loss.backward()
        if strategy == "average":
            average_gradients(model)  # without it, the ranks drift apart
        optimizer.step()
        losses.append(float(average(loss.detach())))
        checkpoints.save(losses, last=step + 1 == steps)
        if on_step is not None and rank == 0:
            on_step(step + 1, losses[-1])
    seconds = time.perf_counter() - start
    state = {name: value.cpu() for name, value in whole_model.state_dict().items()}
    kept = state if keep_state else None
    return History(losses, checksum(state), seconds, world_size, resumed_at, kept)


def parallelize(model: nn.Module, strategy: str, replicas: int = 4) -> nn.Module:
    """Return `model` made parallel as `strategy` says: called like it, and trained.

    The order in which parallelisms are applied is the order of this function's lines.
    Without a process group, all strategies but "dp" return the model as it is.
    """
    if strategy == "dp":
        on_gpus = next(model.parameters()).is_cuda
        return DataParallel(model, range(replicas) if on_gpus else ["cpu"] * replicas)
    if strategy in ("average", "zero1", "zero2") or not dist.is_initialized():
        return model
    if strategy == "naive":
        return NaiveDistributedDataParallel(model)
    if strategy == "flat":
        return FlatDistributedDataParallel(model)
    if strategy == "pytorch":
        return nn.parallel.DistributedDataParallel(model)
    if strategy == "zero3":
        return FullyShardedDataParallel(model)
    return DistributedDataParallel(
        model, buckets_in_shared_memory=strategy == "ddp-shared"
    )


def optimizer_for(
    parallel: nn.Module, strategy: str, lr: float
) -> torch.optim.Optimizer:
    """Return the AdamW that trains what `parallelize` returned.

    In stages 1 and 2 of ZeRO it is the optimizer that shards, and averages; in stage 3
    a plain one is given nothing but this rank's shards.
    """
    if strategy == "zero1" and dist.is_initialized():
        return ZeroRedundancyOptimizer(parallel.parameters(), torch.optim.AdamW, lr=lr)
    if strategy == "zero2" and dist.is_initialized():
        return ShardedGradientOptimizer(parallel.parameters(), torch.optim.AdamW, lr=lr)
    return torch.optim.AdamW(parallel.parameters(), lr=lr)


@dataclass(frozen=True)
class Whole:
    """The states of something sharded, as one process would have them.

    Both functions are called by all ranks; what the first returns is whole on rank 0.
    """

    state_dict: Callable[[], dict]
    load_state_dict: Callable[[dict], None]


def whole(
    model: nn.Module, parallel: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module | Whole, torch.optim.Optimizer | Whole]:
    """Return what has the whole states of a model and of its optimizer.

    They have the names and shapes of the plain ones, so that a run can go on with
    another strategy, or another number of ranks.
    """
    if isinstance(parallel, FullyShardedDataParallel):
        return (
            Whole(parallel.full_state_dict, parallel.load_full_state_dict),
            Whole(
                partial(parallel.full_optimizer_state_dict, optimizer, rank0_only=True),
                partial(parallel.load_full_optimizer_state_dict, optimizer),
            ),
        )
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        consolidated = partial(_consolidated, optimizer)
        return model, Whole(consolidated, optimizer.load_state_dict)
    return model, optimizer


def _consolidated(optimizer: ZeroRedundancyOptimizer) -> dict:
    """Return all ranks' states on rank 0."""
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict() if dist.get_rank() == 0 else {}


def check(
    steps: int, batch_size: int, strategy: str, replicas: int, world_size: int
) -> None:
    """Raise ValueError, naming the value and what is allowed, if this cannot train."""
    if steps < 0:
        raise ValueError(f"steps is {steps}; it must be 0 or more")
    if strategy not in STRATEGIES:
        raise ValueError(
            f"strategy is {strategy!r}; it can be one of {', '.join(STRATEGIES)}"
        )
    parts, whose = world_size, "rank"
    if strategy == "dp":
        if world_size > 1:
            raise ValueError(
                f"strategy 'dp' is one process with threads, and here are {world_size} "
                f"ranks; start one, or take another strategy"
            )
        if replicas < 1:
            raise ValueError(f"replicas is {replicas}; it must be 1 or more")
        parts, whose = replicas, "replica"
    if batch_size < 1 or batch_size % parts:
        raise ValueError(
            f"{batch_size} rows cannot be shared equally by {parts} {whose}"
            f"{'s' * (parts > 1)}; make the batch size a multiple of {parts}"
        )


def average_gradients(model: nn.Module) -> None:
    """Replace every gradient of `model` by its mean over the ranks, one by one.

    Every rank must call this, with gradients for the same parameters.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            average(parameter.grad)


def average(tensor: Tensor) -> Tensor:
    """Replace `tensor`, in place, by its mean over the ranks, and return it."""
    if dist.is_initialized():
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        tensor /= dist.get_world_size()
    return tensor


def checksum(state: dict[str, Tensor]) -> str:
    """Return 16 hexadecimal digits that change if any bit of `state` changes.

    Equal checksums mean equal names, types, shapes and values, bit by bit.
    """
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def largest_difference(state_a: dict[str, Tensor], state_b: dict[str, Tensor]) -> float:
    """Return the largest |a - b| over all numbers of two states with the same names.

    It is nan if any number is. Raises ValueError if a state is empty, or if names or
    shapes differ.
    """
    if not state_a or not state_b:
        raise ValueError("there is nothing to compare: train(..., keep_state=True)?")
    if only := sorted(state_a.keys() ^ state_b.keys()):
        raise ValueError(f"in one state only: {', '.join(only)}")
    largest = []
    for name, a in state_a.items():
        b = state_b[name]
        if a.shape != b.shape:
            raise ValueError(f"{name} is {tuple(a.shape)} here, {tuple(b.shape)} there")
        largest.append((a.cpu().double() - b.cpu().double()).abs().max())
    return float(torch.stack(largest).max())


if __name__ == "__main__":
    from ddp_course.cli import main  # `ddp-course train`, as torchrun can start it

    code = main(["train", *sys.argv[1:]])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as in `launch.__main__`: PyTorch's threads may abort a good end
