"""A training step under our DistributedDataParallel and under PyTorch's, in one run.

A step is forward, backward and optimizer. All variants are measured in turns inside the
same ranks, in another order in every turn, as in `bench.all_reduce`; a time is that of
the slowest rank. The variants, each with a model and an optimizer of its own:

    default   PyTorch's DDP as it is
    again     the same once more: how much of a difference is noise
    best      PyTorch's DDP with static_graph and gradient_as_bucket_view
    gloo      ours over gloo, as PyTorch's
    shared    ours with buckets in shared memory
    bound     no communication at all: what no DDP can be faster than

All of them use the fused AdamW, the faster of PyTorch's. Chapter 05.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as PyTorchDDP

from ddp_course.bench.all_reduce import quiet
from ddp_course.bench.others import Others, share
from ddp_course.bench.rows import Row, row
from ddp_course.collectives import communicator
from ddp_course.data_parallel.ddp import DistributedDataParallel
from ddp_course.launch import here, spawn
from ddp_course.model import GPTConfig, build_gpt

Times = dict[str, list[float]]
PRESETS = ("1m", "8m")
TOKENS = (128, 1024)  # per rank and step
TURNS = {128: 20, 1024: 10}
SECONDS = (
    0.25  # a turn is repeated until about so much time has passed, 8 times at most
)
TINY = GPTConfig(block_size=16, n_layer=1, d_model=24)

VARIANTS: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "default": PyTorchDDP,
    "again": PyTorchDDP,
    "best": lambda model: PyTorchDDP(
        model, static_graph=True, gradient_as_bucket_view=True
    ),
    "gloo": DistributedDataParallel,
    "shared": lambda model: DistributedDataParallel(
        model, buckets_in_shared_memory=True
    ),
    "bound": lambda model: model,
}
COMPARED = {
    "gloo": ("default", "best"),
    "shared": ("default", "best"),
    "again": ("default",),
    "best": ("default",),
    "bound": ("default",),
}


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each number of ranks, preset, number of tokens and variant."""
    cases = [("tiny", TINY, 32, 3)] if quick else _cases()
    for ranks in (2,) if quick else (2, 4):
        for name, preset, tokens, turns in cases:
            told = spawn(
                measure,
                preset,
                tokens,
                turns,
                world_size=ranks,
                timeout=1200,
                device="cpu",
                output="none",
            )
            yield from rows_of(ranks, name, tokens, told)


def _cases() -> list[tuple[str, str, int, int]]:
    return [(p, p, tokens, TURNS[tokens]) for tokens in TOKENS for p in PRESETS]


def rows_of(
    ranks: int, preset: str, tokens: int, told: list[tuple[Times, list[tuple]]]
) -> Iterator[Row]:
    """Yield the rows of one case. `paired` is the median of the ratios of each turn."""
    shares = [share(list(turn)) for turn in zip(*(o for _, o in told), strict=True)]
    turns = quiet(shares)
    slowest = {
        name: [max(times[name][turn] for times, _ in told) for turn in turns]
        for name in VARIANTS
    }
    for name, others in COMPARED.items():
        for other in others:
            pairs = zip(slowest[name], slowest[other], strict=True)
            yield row(
                "ddp",
                f"{ranks} ranks, {preset}, {tokens} tokens, {name} beside {other}",
                "seconds",
                statistics.median(slowest[name]),
                statistics.median(slowest[other]),
                ranks=ranks,
                preset=preset,
                tokens=tokens,
                variant=name,
                beside=other,
                paired=statistics.median(a / b for a, b in pairs),
                turns=len(turns),
                others=statistics.median(shares[turn] for turn in turns),
            )


# ---- on the ranks ------------------------------------------------------------------


def measure(
    preset: str | GPTConfig, tokens: int, turns: int
) -> tuple[Times, list[tuple]]:
    """On every rank: return seconds per step, by variant and turn, and `Others`."""
    steps = {name: step_of(wrap, preset, tokens) for name, wrap in VARIANTS.items()}
    for name in steps:
        for _ in range(3):  # PyTorch's DDP arranges its buckets anew after the first
            steps[name]()
    times: Times = {name: [] for name in steps}
    repeat = torch.tensor(SECONDS / _seconds(steps["default"], 2))
    dist.broadcast(repeat, 0)  # the same number on all ranks
    repeat = max(1, min(8, round(repeat.item())))
    others, told = Others(), []
    for turn in range(turns):
        others.told()
        for name in random.Random(turn).sample(list(steps), len(steps)):
            steps[name]()  # what the one before has left behind is its affair
            times[name].append(_seconds(steps[name], repeat))
        told.append(others.told())
    return times, told


def _seconds(step: Callable[[], None], repeat: int) -> float:
    """Return the seconds per step of so many; all ranks begin together."""
    meet = communicator().agree
    meet("begin")
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat


def step_of(
    wrap: Callable[[torch.nn.Module], torch.nn.Module],
    preset: str | GPTConfig,
    tokens: int,
) -> Callable[[], None]:
    """Return a function that trains a model of its own for one step."""
    model = build_gpt(preset)
    block = model.config.block_size
    random_tokens = torch.Generator().manual_seed(here().rank)
    shape = (tokens // block, block + 1)
    drawn = torch.randint(model.config.vocab_size, shape, generator=random_tokens)
    x, y = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()  # (B, T)
    replica = wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        _, loss = replica(x, y)
        loss.backward()
        optimizer.step()

    return step
