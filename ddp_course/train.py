"""Train the course's GPT: the same function for one process and for many.

    train()                                                  one process
    spawn(train, world_size=4)                               four, from a notebook
    torchrun --nproc-per-node 4 -m ddp_course.launch ddp_course.train:train

Every rank has the whole model and a part of every batch; the ranks average their
gradients before each step (chapter 00). Rows are shared equally and the loss is a mean,
so the mean of the ranks' gradients is the gradient of the whole batch.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.data import load_corpus, shard
from ddp_course.launch import device
from ddp_course.model import GPTConfig, build_gpt


@dataclass(frozen=True)
class History:
    """What a rank brings home from `train`.

    `losses[k]` is the loss over the global batch of step k, before the step, in nats
    per character. `checksum` is `checksum(state)` of the final parameters, and `state`
    holds them, on the CPU, if asked for. `seconds` is the wall time of the steps.
    """

    losses: list[float]
    checksum: str
    seconds: float
    world_size: int
    state: dict[str, Tensor] | None = field(default=None, repr=False)


def train(
    steps: int = 20,
    batch_size: int = 8,
    preset: str | GPTConfig = "1m",
    lr: float = 3e-4,
    seed: int = 0,
    keep_state: bool = False,
) -> History:
    """Train a GPT for `steps` steps of AdamW on `batch_size` rows, shared by all ranks.

    Without a process group this is one process with the whole batch. Raises ValueError
    if the ranks cannot share the batch equally. Chapter 00.
    """
    together = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    my_device = device()
    corpus = load_corpus()
    model = build_gpt(preset, seed).to(my_device)  # the same weights on every rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    start = time.perf_counter()
    for step in range(steps):
        batch = corpus.batch(step, batch_size, model.config.block_size, seed)
        x, y = (shard(t, rank, world_size).to(my_device) for t in batch)  # (B/n, T)
        _, loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model)  # without it, the ranks drift apart
        optimizer.step()
        losses.append(float(average(loss.detach())))
    seconds = time.perf_counter() - start
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    return History(
        losses, checksum(state), seconds, world_size, state if keep_state else None
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
