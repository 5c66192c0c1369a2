"""Three ranks, one of which is wrong once, or slightly wrong all the time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_course.data import load_corpus, shard
from ddp_course.data_parallel import FlatDistributedDataParallel
from ddp_course.failures.digests import digest, gather_digests
from ddp_course.model import GPTConfig, build_gpt

FAULTS = ("none", "flipped bit", "drift", "wrong gradient")
CONFIG = GPTConfig(block_size=32, n_layer=2, n_head=4, d_model=48)
ROWS, EVERY, STEPS, WRONG_STEP = 12, 4, 32, 17
State = dict[str, Tensor]


@dataclass(frozen=True)
class SilentRun:
    """The record of a training run that rank 0 keeps.

    Attributes:
        losses: the mean loss of all ranks, for each step.
        digests: {step: all ranks' digests before this step}.
        states: {step: rank 0's weights before this step}.
    """

    losses: list[float]
    digests: dict[int, list[int]]
    states: dict[int, State]


def silent_run(
    fault: str, batches: Sequence[int] = range(STEPS), state: State | None = None
) -> SilentRun:
    """Train a small version of the course's GPT on all ranks; called by every rank.

    `batches` are the numbers of the batches to train on, one in each step. `fault` is
    one of FAULTS. It happens in step `WRONG_STEP`: on rank 1 a bit of a weight flips;
    on rank 2 updates are a millionth too large from then on; on rank 1 the gradient is
    256 times too large, as if a bit of the exponents had flipped. `state` has the
    initial weights; None means new ones.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    model, run = build_gpt(CONFIG), SilentRun([], {}, {})
    if state is not None:
        model.load_state_dict(state)
    parallel = FlatDistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches):
        if step % EVERY == 0:
            run.digests[step] = gather_digests(model.parameters())
            run.states[step] = {k: v.clone() for k, v in model.state_dict().items()}
        x, y = load_corpus().batch(batch, ROWS, CONFIG.block_size)
        loss = parallel(shard(x, rank, n), shard(y, rank, n))[1]
        optimizer.zero_grad()
        wrong = step == WRONG_STEP
        factor = 256 if wrong and fault == "wrong gradient" and rank == 1 else 1
        (factor * loss).backward()
        if step >= WRONG_STEP and fault == "drift" and rank == 2:
            for p in model.parameters():
                p.grad *= 1 + 1e-6
        optimizer.step()
        if wrong and fault == "flipped bit" and rank == 1:
            flip_bit(model.blocks[0].mlp.up.weight, 100, 20)
        mean = loss.detach()
        dist.all_reduce(mean)
        run.losses.append(mean.item() / n)
    run.digests[len(batches)] = gather_digests(model.parameters())
    return run


@torch.no_grad()
def flip_bit(tensor: Tensor, place: int, bit: int) -> None:
    """Invert one bit of one number in a tensor of float32; bit 31 is the sign."""
    tensor.view(-1)[place : place + 1].view(torch.int32).bitwise_xor_(1 << bit)


def costs(rows: int = 8) -> tuple[float, float]:
    """Return processor seconds of a digest and of a step of the course's GPT.

    Call it with one thread: `spawn(costs, world_size=1)`.
    """
    model = build_gpt()
    parameters = list(model.parameters())
    x, y = load_corpus().batch(0, rows, model.config.block_size)
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(x, y)[1].backward()
        optimizer.step()

    found = []
    for call in (lambda: digest(parameters), step):
        times = []
        for _ in range(5):
            start = time.thread_time()
            call()
            times.append(time.thread_time() - start)
        found.append(min(times))
    return found[0], found[1]
