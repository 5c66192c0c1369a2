"""A training step under our pipeline and PyTorch's, in one run; and their bubbles.

All ranks work on one batch of 8 microbatches; `tokens` is the number of tokens in a
microbatch. PyTorch's schedules have the same stages.

Then the idle share of each schedule is measured, ours beside PyTorch's and beside the
simulated schedule's (`pipeline.simulate_schedule`). Here layers sleep instead of
computing (30 ms per rank in each of F, I and W; `pipeline.SleepingLayer`), so that four
ranks on two cores do not slow each other. Chapters 10 and 11.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.optim import AdamW

from ddp_course import spec
from ddp_course.bench import steps
from ddp_course.bench.turns import Pair, Row, Timings, row, slowest
from ddp_course.model import PRESETS, cross_entropy
from ddp_course.pipeline import (
    SCHEDULES,
    PipelineParallel,
    SleepingLayer,
    simulate_schedule,
)

ABOUT = "A training step under our pipeline and under PyTorch's, and their bubbles."
MICROBATCHES = 8
WAIT = 0.03  # seconds of F, of I and of W on each rank

THEIRS: dict[str, type] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}
if torch.__version__ < "2.13":
    del THEIRS["zero_bubble"]  # its W raises an error in these versions


# ---- the variants ----------------------------------------------------------------


def our_pipeline(model: nn.Module, schedule: str) -> steps.Parallelized:
    """Return our pipeline, and an optimizer of this rank's stages."""
    pipeline = PipelineParallel(model, schedule, MICROBATCHES)
    return stepping(pipeline, pipeline.step)


def torch_pipeline(model: nn.Module, schedule: str) -> steps.Parallelized:
    """Return PyTorch's pipeline of the same stages, and the same optimizer."""
    pipeline = PipelineParallel(model, schedule, MICROBATCHES)
    return stepping(pipeline, torch_step(pipeline, schedule, cross_entropy))


def stepping(
    pipeline: nn.Module, step: Callable[[Tensor, Tensor], object]
) -> steps.Parallelized:
    """Return a module for `steps`, whose call runs `step`, and its optimizer.

    The pipeline runs backward itself, in its step; the backward of the returned loss
    does nothing.
    """
    optimizer = AdamW(pipeline.parameters(), **steps.ADAMW)

    def call(x: Tensor, y: Tensor) -> tuple[None, Tensor]:
        step(x, y)
        return None, torch.zeros((), requires_grad=True)

    return steps.OneBatch(call, MICROBATCHES), optimizer


def torch_step(
    pipeline: PipelineParallel, schedule: str, loss_fn: Callable[..., Tensor]
) -> Callable[[Tensor, Tensor], object]:
    """Return a step of PyTorch's schedule, with the stages of `pipeline`."""
    number = pipeline.schedule.num_stages
    stages = [
        pipelining.PipelineStage(stage, index, number, torch.device("cpu"))
        for index, stage in pipeline.stages.items()
    ]
    several = issubclass(THEIRS[schedule], PipelineScheduleMulti)
    argument = stages if several else stages[0]
    pipeline_schedule = THEIRS[schedule](argument, MICROBATCHES, loss_fn=loss_fn)
    first, last = 0 in pipeline.stages, number - 1 in pipeline.stages

    def step(x: Tensor, y: Tensor) -> object:
        return pipeline_schedule.step(
            *((x,) if first else ()), target=y if last else None
        )

    return step


AGAIN = "Schedule1F1B again"  # shows the noise
VARIANTS: dict[str, steps.Variant] = {
    **{
        kind.__name__: partial(torch_pipeline, schedule=name)
        for name, kind in THEIRS.items()
    },
    **{f"{name} gloo": partial(our_pipeline, schedule=name) for name in THEIRS},
    AGAIN: partial(torch_pipeline, schedule="1f1b"),
}
SIMULATED, OWN = "simulated schedule", "PyTorch's own"
PAIRS = (
    Pair(AGAIN, "Schedule1F1B", control=True, over=OWN),
    *(
        Pair(f"{name} gloo", kind.__name__, 1.05 if name == "1f1b" else None, over=OWN)
        for name, kind in THEIRS.items()
    ),
    *(
        Pair(f"bubble of {schedule}", denominator, over=f"the bubble of {over}",
             title=f"bubble {schedule}")
        for over in ("PyTorch's", "the formula")
        for schedule, kind in THEIRS.items()
        for denominator in [kind.__name__ if over == "PyTorch's" else SIMULATED]
    ),
)  # fmt: skip


def fits(case: steps.Case, name: str) -> bool:
    """Return whether the model has a layer for each of a variant's stages."""
    layers = PRESETS[case.preset].n_layer + 2
    stages = {
        variant: case.ranks * spec.SCHEDULES[schedule].stages_per_rank
        for schedule, kind in THEIRS.items()
        for variant in (kind.__name__, f"{schedule} gloo")
    }
    return layers >= stages.get(name, case.ranks)


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each number of ranks, model and pair; then the bubbles."""
    yield from steps.contest(quick, VARIANTS, PAIRS, fits=fits)
    for ranks in steps.RANKS:
        timings = steps.on_ranks(ranks, waiting_steps, WAIT, 1 if quick else 3)
        yield from bubble_rows(ranks, timings, WAIT)


# ---- bubbles -------------------------------------------------------------------------


class WaitingForBoth(nn.Module):
    """A layer that waits like `SleepingLayer`, with a backward that PyTorch can split.

    PyTorch cuts autograd's graph where the paths to inputs and to weights part. So
    `forward` waits in F, a function on the path to the input in I, and a function on
    the path to the weight in W.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Wait, and return x times the weight."""
        time.sleep(self.seconds)
        return _Wait.apply(x, self.seconds) * _Wait.apply(self.weight, self.seconds)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error."""
    return (output - target).square().mean()


def waiting_steps(seconds: float, turns: int) -> Timings:
    """Return the seconds of waiting steps, ours and PyTorch's; all ranks call it."""
    contenders = {
        f"{schedule} {side}": waiting_step(side, schedule, layer, seconds)
        for schedule in THEIRS
        for side, layer in (("ours", SleepingLayer), ("theirs", WaitingForBoth))
    }
    return steps.together(contenders, turns, math.inf, repeat=1)


def waiting_step(
    side: str, schedule: str, layer: type, seconds: float
) -> Callable[[], object]:
    """Return a step of our pipeline or PyTorch's (`side`) with layers that wait."""
    p = dist.get_world_size()
    stages = p * spec.SCHEDULES[schedule].stages_per_rank
    each = seconds * p / stages
    times = [each] * (3 if layer is SleepingLayer else 1)
    model = nn.Sequential(*(layer(*times) for _ in range(stages)))
    pipeline = PipelineParallel(model, schedule, MICROBATCHES, loss_fn=mean_square)
    # PyTorch computes the gradient of a stage's input only if the input requires one.
    x = torch.ones(MICROBATCHES, 1, requires_grad=side == "theirs")
    step = pipeline.step
    if side == "theirs":
        step = torch_step(pipeline, schedule, mean_square)
    return lambda: step(x, x)


def bubble_rows(ranks: int, timings: list[Timings], seconds: float) -> Iterator[Row]:
    """Yield for each schedule our idle share beside PyTorch's, and beside the formula.

    The idle share is the part of a step's time that is not spent in F, I and W.
    """
    busy, (times, _) = 3 * MICROBATCHES * seconds, slowest(timings)
    for schedule, kind in THEIRS.items():
        ours, theirs = (
            1 - busy / statistics.median(times[f"{schedule} {side}"])
            for side in ("ours", "theirs")
        )
        simulated = float(
            simulate_schedule(SCHEDULES[schedule](ranks, MICROBATCHES)).bubble
        )
        for denominator, other in ((kind.__name__, theirs), (SIMULATED, simulated)):
            pair = Pair(f"bubble of {schedule}", denominator)
            yield row(f"{ranks} ranks", pair, "share", ours, other, ranks=ranks)
