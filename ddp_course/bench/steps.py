"""Training steps side by side: any number of variants, measured in one run.

A variant is a function that takes a model and returns it made parallel, with its
optimizer. A step is forward, backward and optimizer. All variants are measured in turns
inside the same ranks, in another order in every turn, as in `all_reduce`; a time is
that of the slowest rank.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ddp_course.bench.all_reduce import quiet
from ddp_course.bench.others import Others, share
from ddp_course.bench.rows import Row, row
from ddp_course.collectives import communicator
from ddp_course.launch import here, spawn
from ddp_course.model import GPTConfig, build_gpt

Variant = Callable[[nn.Module], tuple[nn.Module, Optimizer]]
Times = dict[str, list[float]]
Told = tuple[Times, list[tuple]]  # seconds per step, by variant and turn; `Others`
PRESETS = ("1m", "8m")
TOKENS = (128, 1024)  # per rank and step
TURNS = {128: 20, 1024: 10}
SECONDS = (
    0.25  # a turn is repeated until about so much time has passed, 8 times at most
)
TINY = GPTConfig(block_size=16, n_layer=1, d_model=24)


def cases(quick: bool) -> list[tuple[int, str, str | GPTConfig, int, int]]:
    """Return (ranks, name, preset, tokens, turns) of every case."""
    if quick:
        return [(2, "tiny", TINY, 32, 3)]
    return [
        (ranks, preset, preset, tokens, TURNS[tokens])
        for ranks in (2, 4)
        for tokens in TOKENS
        for preset in PRESETS
    ]


def on_ranks(ranks: int, function: Callable, *args: object) -> list:
    """Call a bench's `measure` on so many ranks, on the CPU, and return all answers."""
    return spawn(
        function, *args, world_size=ranks, timeout=1200, device="cpu", output="none"
    )


def rows_of(
    bench: str,
    compared: Mapping[str, Sequence[str]],
    ranks: int,
    preset: str,
    tokens: int,
    told: list[Told],
) -> Iterator[Row]:
    """Yield the rows of one case. `paired` is the median of the ratios of each turn.

    `compared` says beside which others each variant is laid.
    """
    shares = [share(list(turn)) for turn in zip(*(o for _, o in told), strict=True)]
    turns = quiet(shares)
    slowest = {
        name: [max(times[name][turn] for times, _ in told) for turn in turns]
        for name in told[0][0]
    }
    for name, others in compared.items():
        for other in others:
            pairs = zip(slowest[name], slowest[other], strict=True)
            yield row(
                bench,
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
    variants: Mapping[str, Variant], preset: str | GPTConfig, tokens: int, turns: int
) -> Told:
    """On every rank: return seconds per step, by variant and turn, and `Others`.

    The first variant says how often a step is repeated in a turn.
    """
    steps = {name: step_of(make, preset, tokens) for name, make in variants.items()}
    for name in steps:
        for _ in range(3):  # PyTorch's DDP arranges its buckets anew after the first
            steps[name]()
    times: Times = {name: [] for name in steps}
    repeat = torch.tensor(SECONDS / _seconds(next(iter(steps.values())), 2))
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
    communicator().agree_now("begin")
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat


def step_of(make: Variant, preset: str | GPTConfig, tokens: int) -> Callable[[], None]:
    """Return a function that trains a model of its own for one step."""
    model = build_gpt(preset)
    block, vocabulary = model.config.block_size, model.config.vocab_size
    random_tokens = torch.Generator().manual_seed(here().rank)
    shape = (tokens // block, block + 1)
    drawn = torch.randint(vocabulary, shape, generator=random_tokens)
    x, y = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()  # (B, T)
    replica, optimizer = make(model)

    def step() -> None:
        optimizer.zero_grad()
        _, loss = replica(x, y)
        loss.backward()
        optimizer.step()

    return step
