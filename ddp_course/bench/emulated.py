"""A rank of an imagined cluster: `train` with a memory limit, a slow chip, slow links.

    watched = partial(EmulatedRank, limit=10e6, seconds=layer_seconds)
    train(steps, watched=watched, pp=4)

The training is real: real messages, real memory, real losses. Only a layer's time is
imagined: after a layer, the rank sleeps until it has used as many seconds as the
imagined chip would need (`seconds`), its own CPU time included. So eight ranks fit on
two cores. All messages go through this course's collectives, where byte meters count
them and emulated links delay them. Chapter 18.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_course.collectives import ring_all_reduce
from ddp_course.gpt_config import GPTConfig
from ddp_course.ledger import Ledger
from ddp_course.measure import ByteMeter, MemoryLog
from ddp_course.mechanisms.exchange import MessageExchange
from ddp_course.mechanisms.recompute import recompute_blocks
from ddp_course.mesh import make_groups
from ddp_course.model import build_gpt
from ddp_course.parallelize import optimizer_for, parallelize
from ddp_course.planning.step_time import Candidate
from ddp_course.spec import layout_for


class OutOfMemory(RuntimeError):
    """An error: an operation has allocated more than the rank's memory limit."""


class LimitedMemory(MemoryLog):
    """A MemoryLog that raises OutOfMemory when more than `limit` bytes are kept."""

    def __init__(self, limit: float, *modules_and_optimizers: Any) -> None:
        super().__init__(*modules_and_optimizers)
        self.limit = limit
        self._total = self._counted = 0

    def __enter__(self) -> LimitedMemory:
        """Start a new record."""
        self._total = self._counted = 0
        super().__enter__()
        return self

    def record_operation(self, name: str, inputs: Any, result: Any) -> None:
        """Record an operation; raise OutOfMemory if its result exceeds the limit."""
        super().record_operation(name, inputs, result)
        changes = self._storages.changes
        new = changes[self._counted :]
        self._counted += len(new)
        self._total += sum(nbytes for _, _, parts in new for _, nbytes in parts)
        if self._total > self.limit:
            raise OutOfMemory(
                f"out of memory: this rank keeps {self._total / 1e6:.2f} MB, and has "
                f"{self.limit / 1e6:.2f} MB; use a layout that "
                f"keeps less on each rank. It keeps:\n{self.peak}"
            )


@dataclass(frozen=True)
class RankStep:
    """One step of one rank: when it began and ended, and what it kept and sent.

    `peak` is None if its memory was not logged.
    """

    start: float
    end: float
    peak: Ledger | None
    sent: int


class EmulatedRank:
    """A context manager around each step of this rank's training.

    Args:
        model, optimizer: the model that `train` trains, and its optimizer.
        limit: bytes that the rank may keep.
        seconds: takes a number of rows; returns a layer's seconds of forward and of
            backward on the imagined chip. None: layers take the time that they take.
        logged: the number of the step in which memory is logged and limited: not step
            0, in which optimizers create their states. Logging takes time, so layers
            wait only in later steps.

    Attributes:
        steps: a RankStep for each step so far.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Optimizer,
        limit: float = float("inf"),
        seconds: Callable[[int], tuple[float, float]] | None = None,
        logged: int = 1,
    ) -> None:
        module = model if isinstance(model, nn.Module) else model.module
        use_links(model, module)
        self.log = LimitedMemory(limit, module, optimizer)
        self.steps: list[RankStep] = []
        self.logged, self.clock = logged, _Clock()
        if seconds is not None:
            for block in blocks_of(module):
                block.register_forward_hook(_Wait(self.clock, seconds))

    def __enter__(self) -> EmulatedRank:
        """Begin to measure a step."""
        logging = len(self.steps) == self.logged
        self.clock.runs = len(self.steps) > self.logged
        self._open = [ByteMeter(), *([self.log] if logging else [])]
        self._start = time.perf_counter()
        for each in self._open:
            each.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """End the step, and add it to `steps`."""
        end = time.perf_counter()
        for each in reversed(self._open):
            each.__exit__(*error)
        meter, *logs = self._open
        peak = logs[0].peak if logs else None
        self.steps.append(RankStep(self._start, end, peak, meter.total_sent))


def kept_by(layout: Candidate, config: GPTConfig, rows: int) -> Ledger:
    """Return the bytes that this rank keeps at the peak of a layout's second step.

    All ranks call it, and really train the GPT. Without a pipeline, microbatches add up
    gradients, and the last microbatch averages them. The first step has short rows; it
    creates the optimizer's states and the buckets.
    """
    parts = rows // (layout.dp * layout.microbatch)
    how = {"pp": layout.pp, "tp": layout.tp, "zero": layout.zero}
    asked = layout_for(layout.ranks, microbatches=parts, **how)
    axes = make_groups(asked.mesh, *asked.together)
    model = build_gpt(config)
    if layout.recompute == "full":
        recompute_blocks(model)
    model = parallelize(model, asked, axes)
    optimizer = optimizer_for(model, asked, axes, lr=1e-3)

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad()
        if layout.pp > 1:
            model.step(tokens, tokens)
        else:
            for k, part in enumerate(tokens.split(layout.microbatch)):
                adds_up = k < parts - 1 and hasattr(model, "no_sync")
                with model.no_sync() if adds_up else nullcontext():
                    (model(part, part)[1] / parts).backward()
        optimizer.step()

    tokens = torch.zeros(rows // layout.dp, config.block_size, dtype=torch.int64)
    step(tokens[:, :8])
    module = model if isinstance(model, nn.Module) else model.module
    with MemoryLog(module, optimizer) as log:
        step(tokens)
    return log.peak


def use_links(model: Any, module: nn.Module) -> None:
    """Replace a parallel model's all-reduces by our ring, which slow links delay."""
    for each in (model, *module.modules()):
        engine, exchange = getattr(each, "engine", None), getattr(each, "group", None)
        if hasattr(getattr(engine, "reducer", None), "all_reduce"):
            engine.reducer.all_reduce = ring_all_reduce
        if isinstance(exchange, MessageExchange):
            exchange.launch = ring_all_reduce


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the transformer blocks that this rank has."""
    return [each for each in module.modules() if hasattr(each, "mlp")]


class _Clock:
    """A clock of the imagined chip; `sleep` returns at once unless `runs` is True."""

    def __init__(self) -> None:
        self.last, self.runs = time.thread_time(), True

    def sleep(self, seconds: float) -> None:
        """Sleep for `seconds`, less this thread's CPU time since the last call."""
        computed = time.thread_time() - self.last
        if self.runs:
            time.sleep(max(0.0, seconds - max(0.0, computed)))
        self.last = time.thread_time()


class _Wait:
    """A forward hook: the layer takes the chip's time, in forward and in backward."""

    def __init__(self, clock: _Clock, seconds: Callable) -> None:
        self.clock, self.seconds = clock, seconds

    def __call__(self, block: nn.Module, args: tuple, output: Tensor) -> Tensor:
        forward, backward = self.seconds(output.shape[0])
        return _Slow.apply(output, self.clock, forward, backward)


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, clock: _Clock, forward: float, backward: float
    ) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward
        clock.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.sleep(ctx.seconds)
        return gradient, None, None, None
