"""Counted FLOPs, this machine's speeds, and speeds of the GPT's parts and steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ddp_course.mechanisms.recompute import recompute_blocks
from ddp_course.model import GPTConfig, build_gpt
from ddp_course.planning.accelerators import Accelerator, Cluster
from ddp_course.planning.step_time import SUSTAINED, Candidate, Software, predict
from ddp_course.planning.workload import Workload

FLOAT32 = 4  # bytes


def counted_flops(
    config: GPTConfig, *, fused: bool = False, recomputed: bool = False
) -> float:
    """Return the FLOPs of a token, forward and backward, as PyTorch counts them.

    `fused` leaves attention to the CPU's fused kernel, which PyTorch does not count;
    with `recomputed`, backward computes the blocks' forward again.
    """
    model = build_gpt(config)
    if recomputed:
        recompute_blocks(model)
    x = torch.zeros(1, config.block_size, dtype=torch.int64)
    kernel = nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, kernel:
        model(x, x.clone())[1].backward()
    return counter.get_total_flops() / x.numel()


def seconds_of(function: Callable[[], object], times: int = 3) -> float:
    """Return the least processor time of `times` calls, in seconds, after a warm-up.

    Only this thread's time counts, not that of other processes on the same core.
    """
    function()
    found = []
    for _ in range(times):
        start = time.thread_time()
        function()
        found.append(time.thread_time() - start)
    return min(found)


@dataclass(frozen=True)
class Machine:
    """The speeds of one core: FLOP/s of a large product, and bytes/s of its memory."""

    flops: float
    bandwidth: float

    @classmethod
    def measured(cls) -> Machine:
        """Measure this core: multiply 1,024 x 1,024 matrices, copy 64 MiB."""
        a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
        large = torch.randn(2**24)
        copy = torch.empty_like(large)
        product = seconds_of(lambda: a @ b)
        moved = seconds_of(lambda: copy.copy_(large))
        return cls(2 * 1024**3 / product, 2 * large.nbytes / moved)

    @property
    def ridge(self) -> float:
        """The FLOPs per byte above which computing is the limit, not memory."""
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Part:
    """A part of a training step.

    Attributes:
        name: the part's name.
        flops: FLOPs of one call.
        nbytes: the fewest bytes that one call can read and write.
        seconds: measured seconds of one call.
    """

    name: str
    flops: float
    nbytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.nbytes


def parts(rows: int = 4096, channels: int = 1024) -> list[Part]:
    """Measure the parts of a transformer's layer on one core, for `rows` tokens.

    Each part has more numbers than a core's own cache holds, but a large shared cache
    may hold them. Attention runs over sequences of 1,024 tokens.
    """
    n, c = rows, channels
    x, wide = torch.randn(n, c), torch.randn(n, 4 * c)
    up, one = torch.randn(c, 4 * c), torch.randn(1, c)
    norm = nn.LayerNorm(c)
    weight = nn.Parameter(torch.randn(4 * c * c))
    weight.grad = torch.randn(4 * c * c)
    adam = torch.optim.AdamW([weight], foreach=False, fused=True)
    heads = torch.randn(n // 1024, c // 64, 1024, 64)
    attend = nn.functional.scaled_dot_product_attention
    with torch.no_grad():
        timed = {
            "MLP": (lambda: x @ up, 8 * n * c * c, 5 * n * c + 4 * c * c),
            "MLP, one token": (lambda: one @ up, 8 * c * c, 5 * c + 4 * c * c),
            "attention": (lambda: attend(heads, heads, heads), 4 * n * 1024 * c,
                          4 * n * c),
            "norm": (lambda: norm(x), 8 * n * c, 2 * n * c),
            "GELU": (lambda: nn.functional.gelu(wide), 40 * n * c, 8 * n * c),
            "residual": (lambda: x + x, n * c, 2 * n * c),
            "AdamW": (adam.step, 12 * weight.numel(), 7 * weight.numel()),
        }  # fmt: skip
        return [
            Part(name, flops, FLOAT32 * numbers, seconds_of(call))
            for name, (call, flops, numbers) in timed.items()
        ]


def training_speed(
    config: GPTConfig, rows: int = 8, *, recomputed: bool = False
) -> float:
    """Return the tokens on which one core trains in a second of processor time."""
    model = build_gpt(config)
    if recomputed:
        recompute_blocks(model)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.zeros(rows, config.block_size, dtype=torch.int64)

    def step() -> None:
        model(x, x.clone())[1].backward()
        optimizer.step()
        optimizer.zero_grad()

    return x.numel() / seconds_of(step)


# ---- steps that compute --------------------------------------------------------------

WIDE = GPTConfig(block_size=256, n_layer=4, n_head=8, d_model=512)
ROWS = 4  # rows of each rank, in one microbatch


def foreseen_seconds(machine: Machine, link: float, ranks: int) -> float:
    """Return the predicted seconds of a step of `WIDE` on `ranks` ranks along dp.

    Args:
        machine: the speeds of one core, which is each rank's chip.
        link: bytes/s between two ranks.
        ranks: 1 or 2.
    """
    chip = Accelerator(
        machine.flops, 1e9, machine.bandwidth, link, None, matmul=1 / SUSTAINED
    )
    cluster = Cluster(chip, ranks, latency=0, reached=1, rails=False)
    software = Software(precision="fp32", bucket=25e6)
    workload = Workload.of_gpt(WIDE, rows=ROWS * ranks)
    return predict(
        workload, cluster, Candidate(ranks, microbatch=ROWS), software
    ).seconds


def real_step(times: int = 2) -> tuple[float, float]:
    """Return the least processor seconds of a step of `WIDE`, and bytes/s of the link.

    Called by one rank or two. The step computes, averages its gradients as PyTorch's
    DDP does, and updates the weights. The time of other programs does not count, nor
    does waiting for a message.
    """
    model = build_gpt(WIDE)
    link = 1.0
    if dist.get_world_size() > 1:
        model = nn.parallel.DistributedDataParallel(model)
        tensor = torch.zeros(2**22)
        call = min(
            _took(lambda: dist.all_reduce(tensor), time.perf_counter)
            for _ in range(times)
        )
        link = tensor.nbytes / call  # a ring sends 2 (n - 1) / n tensors: 1 for n = 2
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=True)
    x = torch.zeros(ROWS, WIDE.block_size, dtype=torch.int64)

    def step() -> None:
        optimizer.zero_grad()
        model(x, x)[1].backward()
        optimizer.step()

    step()
    return min(_took(step, time.process_time) for _ in range(times)), link


def _took(call: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    call()
    return clock() - start
