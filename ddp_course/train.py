"""Train the course's GPT: the same function for one process and for many.

    train()                                                  one process
    spawn(train, world_size=4)                               four, from a notebook
    torchrun --nproc-per-node 4 -m ddp_course train          four, also on many machines
    ddp-course train --ranks 4                               four, on this machine

Every rank has a part of every batch, and the ranks average their gradients before each
step. Rows are shared equally and the loss is a mean, so the mean of the ranks'
gradients is the gradient of the whole batch. `train_simply` does this, and nothing else
(chapter 00). `train` is the same loop with what a long run needs: checkpoints,
clipping, and a layout, which says how the ranks average and which part of the model
each of them keeps (`spec.Layout`). Ranks that hold parts of one model get the same
rows.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.checkpoint import Checkpoints
from ddp_course.data import load_corpus, shard
from ddp_course.experts.gpt import build_mixture_gpt
from ddp_course.failures.notice import Notice
from ddp_course.gpt_config import GPTConfig, MixtureConfig
from ddp_course.launch import device
from ddp_course.launch.torchrun import check_alone
from ddp_course.mechanisms.agreement import agreed
from ddp_course.mesh import make_groups
from ddp_course.model import build_gpt, config_named
from ddp_course.parallelize import (
    autocast,
    clip_gradients,
    dtype_of,
    optimizer_for,
    parallelize,
    strategies_of,
    whole,
)
from ddp_course.precision import GradScaler
from ddp_course.spec import (
    Layout,
    Training,
    check_fields,
    check_names,
    layout_for,
)


def train_simply(
    steps: int, batch_size: int = 8, lr: float = 3e-4
) -> tuple[list[float], dict[str, Tensor]]:
    """Train the GPT on `batch_size` rows that all ranks share: data parallelism.

    Returns the loss of the global batch before each step, in nats per character, and
    the parameters, on the CPU. Chapter 00.
    """
    together = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    model = build_gpt("1m", seed=0).to(device())  # the same weights on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    corpus, losses = load_corpus(), []
    for step in range(steps):
        batch = corpus.batch(step, batch_size, model.config.block_size)
        x, y = (shard(t, rank, world_size).to(device()) for t in batch)  # my rows
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)  # without it, the ranks drift apart
        optimizer.step()
        losses.append(float(average(loss.detach())))
    return losses, {name: value.cpu() for name, value in model.state_dict().items()}


@dataclass(frozen=True)
class History:
    """The result of `train` on one rank.

    `losses[k]` is the loss over the global batch of step k, before the step, in nats
    per character. `checksum` is `checksum(state)` of the final parameters, and `state`
    holds them, on the CPU, if asked for. `resumed_at` is the number of steps that an
    earlier run had done, and `seconds` the wall time of the steps of this run.
    `stopped` says that a rank got SIGTERM, so that training ended before the last step.
    """

    losses: list[float]
    checksum: str
    seconds: float
    world_size: int
    resumed_at: int = 0
    state: dict[str, Tensor] | None = field(default=None, repr=False)
    stopped: bool = False


def train(
    steps: int = Training.steps,
    batch_size: int = Training.batch_size,
    preset: str | GPTConfig = Training.preset,
    lr: float = Training.lr,
    seed: int = Training.seed,
    experts: int | None = None,
    experts_per_token: int = Training.experts_per_token,
    capacity: float | None = None,
    balance: float = Training.balance,
    keep_state: bool = False,
    clip: float | None = None,
    checkpoint: str | Path | None = None,
    every: int = Training.every,
    save: str = Training.save,
    on_step: Callable[[int, float], None] | None = None,
    watched: Callable[[nn.Module, Optimizer], AbstractContextManager] | None = None,
    **layout_options: Any,
) -> History:
    """Train a GPT for `steps` steps of AdamW on `batch_size` rows, shared by all ranks.

    Without a process group this is one process with the whole batch. The
    `layout_options` are fields of `spec.Layout`: tp=2, zero=1, precision="bf16". With
    `experts` each MLP is a mixture of this many (`gpt_config.MixtureConfig`). `clip`
    limits the norm of the whole model's gradient. With a folder `checkpoint`, the run
    resumes from the newest checkpoint in it, and saves one after every `every` steps
    and at its end; with `save="async"` a thread writes it while training goes on. If a
    rank of such a run gets SIGTERM, all ranks save after the same step and return early
    (`History.stopped`). Rank 0 calls `on_step(steps done, loss)`. Every rank calls
    `watched(model, optimizer)` once, and enters the context manager that it returns for
    each step: chapter 18 limits memory in this way.

    Raises ValueError, before any message is sent, for rows that cannot be shared
    equally, an option that does not exist or differs between the ranks, or processes of
    a cluster that have not initialised their process group. Chapters 04, 05, 09 and 10.
    """
    *own, _ = signature(train).parameters
    check_names(layout_options, (*own, *(each.name for each in fields(Layout))))
    check_alone()
    together = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    my_device = device()
    expert_options = experts, experts_per_token, capacity, balance
    asked = Training(
        steps, batch_size, "1m", lr, seed, *expert_options, clip, None, every, save
    )
    check_fields(asked)
    for name, value in {"on_step": on_step, "watched": watched}.items():
        if value is not None and not callable(value):
            raise ValueError(f"{name} is {value!r}; it must be a function or None")
    layout = layout_for(world_size, **layout_options)
    corpus = load_corpus()
    config = asked.with_experts(config_named(preset))
    layout.check(batch_size=batch_size, config=config)
    if together:  # ranks with other options would hang, or train another model
        saves = {"config": config, "checkpoint": "set" if checkpoint else "not set"}
        agreed(lambda: None, None, **{**vars(asked), **vars(layout), **saves})
    build = build_mixture_gpt if isinstance(config, MixtureConfig) else build_gpt
    model = build(config, seed).to(my_device, dtype_of(layout))
    axes = make_groups(layout.mesh, *layout.together) if together else None
    strategies = strategies_of(layout, axes)
    model = parallelize(model, layout, axes)
    optimizer = optimizer_for(model, layout, axes, lr)
    whole_model, whole_optimizer = whole(model, optimizer)
    settings = {"batch_size": batch_size, "lr": lr, "seed": seed, "clip": clip}
    settings |= {"precision": layout.precision, **asdict(config)}
    if layout.compress is not None:  # each rank saves its own compression errors
        settings |= {"compress": layout.compress, "ranks": world_size}
    settings |= {} if layout.local is None else {"local": dict(layout.local)}
    scaler = GradScaler(enabled=layout.precision == "fp16")
    more = {"scaler": scaler}
    for strategy in strategies:
        more |= strategy.states(model)
    has_state = whole_model, whole_optimizer
    checkpoints = Checkpoints(
        checkpoint, every, *has_state, settings, more=more, background=save == "async"
    )
    share, shares = layout.share(rank)  # equal on all ranks that share one model
    stopped = False
    watch = nullcontext() if watched is None else watched(model, optimizer)
    with Notice() if checkpoint is not None else nullcontext() as notice:
        losses = checkpoints.load(steps)  # one for each step that is done
        resumed_at = len(losses)
        start = time.perf_counter()
        for step in range(resumed_at, steps):
            batch = corpus.batch(step, batch_size, config.block_size, seed)
            mine = [shard(t, share, shares).to(my_device) for t in batch]
            with watch:
                loss = _step(model, optimizer, scaler, layout, clip, *mine)
            if notice is None:
                losses.append(float(average(loss)))
            else:
                losses.append(notice.share(loss, average))
                stopped = notice.agreed and step + 1 < steps
                checkpoints.save(losses, last=stopped or step + 1 == steps)
            if on_step is not None and rank == 0:
                on_step(step + 1, losses[-1])
            if stopped:
                break
    seconds = time.perf_counter() - start
    for strategy in strategies:
        if strategy.finish is not None:  # the ranks' models may differ until here
            strategy.finish(model)
            whole_model = model
    state = {name: value.cpu() for name, value in whole_model.state_dict().items()}
    kept = state if keep_state else None
    digest = checksum(state)
    return History(losses, digest, seconds, world_size, resumed_at, kept, stopped)


def _step(
    model: nn.Module,
    optimizer: Optimizer,
    scaler: GradScaler,
    layout: Layout,
    clip: float | None,
    x: Tensor,
    y: Tensor,
) -> Tensor:
    """Run one step on this rank's rows, each (B/shares, T); return their loss."""
    optimizer.zero_grad()
    if "pp" in layout.mesh.axes:
        with autocast(layout):  # the schedule runs forward and backward
            loss = model.step(x, y, scaler.get_scale())
    else:
        with autocast(layout):
            _, loss = model(x, y)
        loss = loss.mean()  # each thread returns a loss
        scaler.scale(loss).backward()
    if layout.data_parallel == "average":
        average_gradients(model)
    if clip is not None:
        scaler.unscale_(optimizer)
        clip_gradients(model, optimizer, clip)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach().float()


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

    The result is nan if any number is nan. Raises ValueError if a state is empty, or if
    names or shapes differ.
    """
    if not state_a or not state_b:
        raise ValueError("a state is empty or None; call train(..., keep_state=True)")
    if only := sorted(state_a.keys() ^ state_b.keys()):
        raise ValueError(f"only one of the two states has {', '.join(only)}")
    largest = []
    for name, a in state_a.items():
        b = state_b[name]
        if a.shape != b.shape:
            raise ValueError(
                f"{name} has shape {tuple(a.shape)} in the first state and "
                f"{tuple(b.shape)} in the second; they must be equal"
            )
        largest.append((a.cpu().double() - b.cpu().double()).abs().max())
    return float(torch.stack(largest).max())
