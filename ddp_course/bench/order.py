"""Priority compared with our DDP on slow links, and the gain that a simulation finds.

Both use four ranks and a ring over links of 100 MB/s. Layers that sleep for fixed times
show the effect of the order alone; the GPT computes, which takes different times on
every rank. The simulation uses the times of the first steps (`planned`): its gain is
the time of a step by priority over that of a step that waits for all. Chapter 15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ddp_course.bench import steps
from ddp_course.bench.turns import Pair, Row, Timings, against, row, rows_of
from ddp_course.collectives import ring_all_reduce
from ddp_course.communication_order import (
    WAIT_FOR_ALL,
    Policy,
    ScheduledDataParallel,
    SleepingStack,
    priority,
    simulate_step,
)
from ddp_course.data import load_corpus
from ddp_course.data_parallel import DistributedDataParallel
from ddp_course.launch import Link, Links, spawn
from ddp_course.model import GPT, build_gpt

ABOUT = "A step by priority beside a step of our DDP, on links of 100 MB/s."
DDP, GAIN, SIMULATED = "ddp", "gain", "simulated"
RANKS, LINKS = 4, Links(inside=Link(0.0, 100e6))
PIECE = 1 << 20
POLICIES: dict[str, Policy] = {
    "wait for all": replace(WAIT_FOR_ALL, piece=PIECE),
    "whole layers": priority(),
    "pieces": priority(PIECE),
}
GAINS = {n: Pair(f"{GAIN}, {n}", SIMULATED, 1.05) for n in ("whole layers", "pieces")}
PAIRS = (*against(DDP, dict.fromkeys(POLICIES)), *GAINS.values())
LAYERS = [(0.03, 0.05, 4 << 20)] * 6  # a layer's gradient is all-reduced in 63 ms
CASES: dict[str, Callable[[], nn.Module]] = {
    "layers that wait": partial(SleepingStack, LAYERS),
    "GPT 1m": partial(build_gpt, "1m"),
}


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row per case and policy, and two comparisons with the simulation."""
    for case, make in CASES.items():
        turns = 3 if quick else 12
        run = partial(spawn, world_size=RANKS, links=LINKS, output="none", device="cpu")
        all_timings, gains = zip(*run(side_by_side, make, turns), strict=True)
        rows = {r["variant"]: r for r in rows_of(case, PAIRS, all_timings, ranks=RANKS)}
        yield from rows.values()
        for name, pair in GAINS.items():
            measured, simulated = rows[name]["paired"], gains[0][name]
            yield row(case, pair, "ratio", measured, simulated, ranks=RANKS)


# ---- on the ranks --------------------------------------------------------------------


def side_by_side(
    make: Callable[[], nn.Module], turns: int
) -> tuple[Timings, dict[str, float]]:
    """Return the times of all contenders, and the simulated gains."""
    model, optimizer = steps.with_adamw(make())
    how = {"all_reduce": ring_all_reduce}
    ddp = DistributedDataParallel(model, bucket_cap_mb=1, **how)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    ways = {DDP: stepping(ddp, step, batch_of(model))}
    scheduled = {}
    for name, policy in POLICIES.items():
        model, optimizer = steps.with_adamw(make())
        layers = ()
        if isinstance(model, GPT) and policy.piece is None:
            layers = [model.embed, *model.blocks, model.head]
        own = ScheduledDataParallel(model, optimizer, policy, layers=layers, **how)
        scheduled[name] = own
        ways[name] = stepping(own, own.step, batch_of(model))
    # The order is planned during the six warm-up steps.
    timings = steps.together(ways, turns, 60.0, 1, warm=6)
    gains = {}
    for name, own in scheduled.items():
        own.finish()
        waited = simulate_step(own.planned.layers, WAIT_FOR_ALL, each=own.planned.each)
        gains[name] = float(own.planned.step_time / waited.step_time)
    return timings, gains


def batch_of(model: nn.Module) -> tuple[Tensor, ...]:
    """Return the model's arguments: for a GPT two rows of tokens, and their targets.

    All ranks get the same arguments, since no time depends on their values.
    """
    if not isinstance(model, GPT):
        return (torch.ones(1),)
    return load_corpus().batch(0, 2, model.config.block_size)


def stepping(
    model: nn.Module, step: Callable[[], None], batch: tuple[Tensor, ...]
) -> Callable[[], None]:
    """Return a function that runs backward, step and the next forward."""

    def forward() -> Tensor:
        output = model(*batch)
        return output[1] if isinstance(output, tuple) else output

    losses = [forward()]

    def once() -> None:
        losses.pop().backward()
        step()
        losses.append(forward())

    return once
