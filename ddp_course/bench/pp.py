"""A training step under our pipeline and PyTorch's, in one run; and their bubbles.

All ranks work on one batch of 8 microbatches; `tokens` are those of a microbatch. The
variants, each with a model and an optimizer of its own (`steps` measures them in
turns), all with the fused AdamW:

    Schedule1F1B  PyTorch's, with its stages cut where ours are
    Schedule1F1B again
                  the same once more: how much of a difference is noise
    1f1b gloo     ours
    ScheduleGPipe, gpipe gloo
                  all forwards first
    ScheduleInterleaved1F1B, interleaved gloo
                  two stages on each rank
    ScheduleInterleavedZeroBubble, zero_bubble gloo
                  backward in two halves, one stage on each rank

Then the idle share of each schedule, with layers that on each rank together wait for 30
ms in each of F, I and W instead of computing, so that four ranks on two cores do not
hinder each other (`pipeline.Waiting`): ours beside PyTorch's, and beside what the
schedule asks for (`pipeline.simulate`). Chapters 10 and 11.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.optim import AdamW, Optimizer

from ddp_course.bench import steps
from ddp_course.bench.rows import Row, row
from ddp_course.collectives import communicator
from ddp_course.model import PRESETS, GPTConfig, cross_entropy
from ddp_course.pipeline import SCHEDULES, PipelineParallel, Waiting, simulate

Made = tuple[nn.Module, Optimizer]
LR = 1e-4
MICROBATCHES = 8
SECONDS = 0.03  # of F, of I and of W on each rank
TINY = GPTConfig(block_size=8, n_layer=2, d_model=24)

THEIRS: dict[str, Callable[..., Any]] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


class Loss(nn.Module):
    """Makes a pipeline look as `steps` wants it: a call returns a loss to go back from.

    The pipeline goes backward itself, in its step; what is returned has nothing left to
    do.
    """

    def __init__(self, step: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.step = step
        self.batch: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, y: Tensor) -> tuple[None, Tensor]:
        """Take a batch that is the same on all ranks, of microbatches like (x, y)."""
        if self.batch is None:
            self.batch = x.repeat(MICROBATCHES, 1), y.repeat(MICROBATCHES, 1)
            for tokens in self.batch:
                dist.broadcast(tokens, 0)
        self.step(*self.batch)
        return None, torch.zeros((), requires_grad=True)


# ---- the variants ----------------------------------------------------------------


def ours(model: nn.Module, schedule: str) -> Made:
    """Return our pipeline, and an optimizer of this rank's part."""
    pipeline = PipelineParallel(model, schedule, MICROBATCHES)
    return Loss(pipeline.step), AdamW(pipeline.parameters(), lr=LR, fused=True)


def theirs(model: nn.Module, schedule: str) -> Made:
    """Return PyTorch's pipeline of the same stages, and the same optimizer."""
    pipeline = PipelineParallel(model, schedule, MICROBATCHES)
    step = theirs_step(pipeline, schedule, cross_entropy)
    return Loss(step), AdamW(pipeline.parameters(), lr=LR, fused=True)


def theirs_step(
    pipeline: PipelineParallel, schedule: str, loss_fn: Callable[..., Tensor]
) -> Callable[[Tensor, Tensor], object]:
    """Return a step of PyTorch's schedule, with the stages of `pipeline`."""
    number = pipeline.schedule.num_stages
    stages = [
        pipelining.PipelineStage(stage, index, number, torch.device("cpu"))
        for index, stage in pipeline.stages.items()
    ]
    several = schedule in ("interleaved", "zero_bubble")
    made = THEIRS[schedule](
        stages if several else stages[0], MICROBATCHES, loss_fn=loss_fn
    )
    first, last = 0 in pipeline.stages, number - 1 in pipeline.stages

    def step(x: Tensor, y: Tensor) -> object:
        return made.step(*((x,) if first else ()), target=y if last else None)

    return step


def name_of(schedule: str) -> str:
    """Return how PyTorch's variant is called."""
    return THEIRS[schedule].__name__


VARIANTS: dict[str, steps.Variant] = {
    "Schedule1F1B": partial(theirs, schedule="1f1b"),
    "Schedule1F1B again": partial(theirs, schedule="1f1b"),
    "1f1b gloo": partial(ours, schedule="1f1b"),
}
for _schedule in ("gpipe", "interleaved", "zero_bubble"):
    VARIANTS[name_of(_schedule)] = partial(theirs, schedule=_schedule)
    VARIANTS[f"{_schedule} gloo"] = partial(ours, schedule=_schedule)


def variants(preset: str | GPTConfig, ranks: int) -> dict[str, steps.Variant]:
    """Return the variants for which the model has a layer for each stage."""
    config = preset if isinstance(preset, GPTConfig) else PRESETS[preset]
    few = config.n_layer + 2 < 2 * ranks
    without = {name_of("interleaved"), "interleaved gloo"} if few else {}
    return {name: make for name, make in VARIANTS.items() if name not in without}


def compared(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return beside which of PyTorch's each variant is laid."""
    pairs = {"Schedule1F1B again": ("Schedule1F1B",)}
    pairs |= {f"{schedule} gloo": (name_of(schedule),) for schedule in THEIRS}
    return {name: others for name, others in pairs.items() if name in names}


def cases(quick: bool) -> list[tuple[int, str, str | GPTConfig, int, int]]:
    """Return (ranks, name, preset, tokens, turns) of every case."""
    if quick:
        return [(2, "tiny", TINY, 16, 3)]
    sizes = [("1m", 128, 20), ("1m", 1024, 10), ("8m", 128, 10)]
    return [
        (ranks, preset, preset, tokens, turns)
        for ranks in (2, 4)
        for preset, tokens, turns in sizes
    ]


def bench(quick: bool) -> Iterator[Row]:
    """Yield a row for each number of ranks, model and variant; then the bubbles."""
    for ranks, name, preset, tokens, turns in cases(quick):
        told = steps.on_ranks(ranks, measure, preset, tokens, turns)
        pairs = compared(told[0][0])
        yield from steps.rows_of("pp", pairs, ranks, name, tokens, told)
    for ranks in (2,) if quick else (2, 4):
        seconds, repeat = (0.002, 1) if quick else (SECONDS, 3)
        yield from bubble_rows(
            ranks, steps.on_ranks(ranks, waits, seconds, repeat), seconds
        )


def measure(preset: str | GPTConfig, tokens: int, turns: int) -> steps.Told:
    """On every rank: return seconds per step, by variant and turn, and `Others`."""
    chosen = variants(preset, dist.get_world_size())
    return steps.measure(chosen, preset, tokens, turns)


# ---- bubbles -------------------------------------------------------------------------


class WaitingForBoth(nn.Module):
    """Waits as `Waiting` does, in a way that PyTorch can split.

    PyTorch cuts autograd's graph where the paths to inputs and to weights part. So one
    function on the path to the input waits in F and I, one on that to the weight in W.
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
    """Return a loss."""
    return (output - target).square().mean()


Seconds = dict[tuple[str, str], list[tuple[float, float]]]  # begin and end of steps


def waits(seconds: float, repeat: int) -> Seconds:
    """On every rank: return when its steps began and ended, of ours and of theirs.

    By schedule, and whose it is. All clocks of a machine are the same one.
    """
    found: Seconds = {}
    for schedule in THEIRS:
        for whose, layer in (("ours", Waiting), ("theirs", WaitingForBoth)):
            step, x = waiting_step(whose, schedule, layer, seconds)
            step(x, x)
            found[schedule, whose] = []
            for _ in range(repeat):
                communicator().agree_now("begin")
                start = time.perf_counter()
                step(x, x)
                found[schedule, whose].append((start, time.perf_counter()))
    return found


def waiting_step(
    whose: str, schedule: str, layer: type, seconds: float
) -> tuple[Callable[[Tensor, Tensor], object], Tensor]:
    """Return a step of ours or of theirs with layers that wait, and its batch."""
    p = dist.get_world_size()
    stages = 2 * p if schedule == "interleaved" else p
    each = seconds * p / stages
    times = (each, each, each) if layer is Waiting else (each,)
    model = nn.Sequential(*(layer(*times) for _ in range(stages)))
    pipeline = PipelineParallel(model, schedule, MICROBATCHES, loss_fn=mean_square)
    # PyTorch goes back to a stage's input only if that requires a gradient.
    x = torch.ones(MICROBATCHES, 1, requires_grad=whose == "theirs")
    if whose == "theirs":
        return theirs_step(pipeline, schedule, mean_square), x
    return pipeline.step, x


def bubble_rows(ranks: int, told: list[Seconds], seconds: float) -> Iterator[Row]:
    """Yield for each schedule our idle share beside theirs, and beside the formula.

    A step's idle share is what is not F, I and W of the time from the first rank's
    begin to the last one's end.
    """
    busy = 3 * MICROBATCHES * seconds
    for schedule in THEIRS:
        share = {}
        for whose in ("ours", "theirs"):
            of_steps = zip(*(rank[schedule, whose] for rank in told), strict=True)
            spans = [max(e for _, e in s) - min(b for b, _ in s) for s in of_steps]
            share[whose] = 1 - busy / statistics.median(spans)
        simulated = simulate(SCHEDULES[schedule](ranks, MICROBATCHES)).bubble
        for name, other in (
            (name_of(schedule), share["theirs"]),
            ("what it asks for", float(simulated)),
        ):
            yield row(
                "pp",
                f"{ranks} ranks, idle share of {schedule} beside {name}",
                "share",
                share["ours"],
                other,
                ranks=ranks,
                schedule=schedule,
                variant=f"bubble of {schedule}",
                beside=name,
            )
