"""Training steps side by side: any number of variants, measured in one run.

A variant is a function that takes a model and returns a parallel model and its
optimizer. A step is forward, backward and optimizer. All variants of a case are
measured in turns inside the same ranks (`turns`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ddp_course.bench.turns import Contender, Pair, Row, Timings, in_turns, rows_of
from ddp_course.collectives import meeting
from ddp_course.collectives.patience import patient, threads_of
from ddp_course.launch import Links, here, spawn
from ddp_course.model import GPTConfig, build_gpt

Parallelized = tuple[nn.Module, Optimizer]
Variant = Callable[[nn.Module], Parallelized]
ADAMW = {"lr": 1e-4, "fused": True}  # PyTorch's fastest implementation
TURN = 0.25  # seconds for which a step is repeated in a turn, at most 8 times
RANKS = (2, 4)
BUDGET = {True: 50.0, False: 400.0}  # seconds for all turns of a bench, by `quick`


def with_adamw(model: nn.Module) -> Parallelized:
    """Return the unchanged model, and an optimizer of its parameters."""
    return model, AdamW(model.parameters(), **ADAMW)


def during_step(
    parallelized: Parallelized, context: Callable[[], object]
) -> Parallelized:
    """Open `context()` when forward begins, and close it before the optimizer steps."""
    (model, optimizer), stack = parallelized, ExitStack()
    enter = lambda *_: stack.enter_context(context()) and None  # noqa: E731
    model.register_forward_pre_hook(enter, prepend=True)
    optimizer.register_step_pre_hook(lambda *_: stack.close())
    return parallelized


def patiently(model: nn.Module, make: Variant) -> Parallelized:
    """Return a variant whose steps use `patience`, as this course's collectives do.

    Compared with the plain variant, it shows how much of our gain is due to `patience`.
    """
    threads = threads_of(meeting())
    return during_step(make(model), lambda: patient(threads))


class OneBatch(nn.Module):
    """A wrapper that calls a module with rank 0's batch, repeated, on every rank.

    `times` is the number of repetitions. Rank 0 broadcasts the batch once.
    """

    def __init__(self, module: Callable[[Tensor, Tensor], Any], times: int = 1) -> None:
        super().__init__()
        self.module, self.times = module, times
        self.batch: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Run the module on rank 0's first batch, repeated: (`times` * B, T)."""
        if self.batch is None:
            self.batch = x.repeat(self.times, 1), y.repeat(self.times, 1)
            for tokens in self.batch:
                dist.broadcast(tokens, 0)
        return self.module(*self.batch)


class Case(NamedTuple):
    """A case: the ranks, the model's preset, the tokens per rank, and the turns."""

    ranks: int
    preset: str | GPTConfig
    tokens: int
    turns: int

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by which a row names the case."""
        return {"ranks": self.ranks, "preset": self.preset, "tokens": self.tokens}

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.preset}, {self.tokens} tokens"


def cases(quick: bool) -> list[Case]:
    """Return the cases of a bench; a quick bench has fewer cases and turns."""
    sizes = [("1m", 128, 20), ("1m", 1024, 10), ("8m", 128, 20)]
    if quick:
        sizes = [("1m", 128, 5)]
    return [Case(ranks, *size) for ranks in RANKS for size in sizes]


def contest(
    quick: bool,
    variants: Mapping[str, Variant],
    pairs: Iterable[Pair],
    sharing: int = 1,
    fits: Callable[[Case, str], bool] = lambda case, name: True,
) -> Iterator[Row]:
    """Yield a row for each case (ranks, preset, tokens) and pair.

    `sharing` is the number of contests that share the bench's time. `fits(case, name)`
    returns whether a variant can run in a case.
    """
    each = BUDGET[quick] / sharing / len(cases(quick))
    for case in cases(quick):
        fitting = {name: make for name, make in variants.items() if fits(case, name)}
        timings = on_ranks(case.ranks, measure, fitting, case, each)
        yield from rows_of(str(case), pairs, timings, **case.fields)


def on_ranks(
    ranks: int, function: Callable, *args: object, links: Links | None = None
) -> list:
    """Call `function` on `ranks` ranks, on the CPU, and return all results."""
    where = {"world_size": ranks, "device": "cpu", "links": links}
    return spawn(function, *args, **where, timeout=1200, output="none")


# ---- on the ranks ------------------------------------------------------------------


def measure(
    variants: Mapping[str, Variant],
    case: Case,
    seconds: float,
    as_one: Callable[[str, Contender], Contender] = lambda name, step: step,
) -> Timings:
    """Return seconds per step by variant and turn, and CPU use; all ranks call it.

    `as_one(name, step)` returns the function that is measured for a variant.
    """
    steps = {name: as_one(name, step_of(v, case)) for name, v in variants.items()}
    # PyTorch's DDP rearranges its buckets after the first step.
    return together(steps, case.turns, seconds, warm=3)


def together(
    contenders: Mapping[str, Contender],
    turns: int,
    seconds: float,
    repeat: int | None = None,
    warm: int = 0,
) -> Timings:
    """Measure contenders in turns that begin together on all ranks; all ranks call it.

    Each contender is first called `warm` times. The measurement ends early after
    about `seconds` on rank 0's clock. By default the first contender's time on rank 0
    decides how often every contender is repeated in a turn.
    """
    for call in contenders.values():
        for _ in range(warm):
            call()
    end = time.perf_counter() + seconds
    if repeat is None:
        one = in_turns(dict([*contenders.items()][:1]), 1)[0].popitem()[1][0]
        repeat = max(1, min(8, round(_from_rank_0(TURN / one))))

    def go_on() -> bool:
        return _from_rank_0(float(time.perf_counter() < end)) == 1

    def meet() -> None:
        meeting().agree("begin")  # a barrier of microseconds

    return in_turns(contenders, turns, repeat, meet=meet, go_on=go_on)


def _from_rank_0(number: float) -> float:
    value = torch.tensor(number)
    dist.broadcast(value, 0)
    return value.item()


def step_of(make: Variant, case: Case) -> Callable[[], None]:
    """Return a function that trains a model of its own for one step."""
    model = build_gpt(case.preset)
    block, vocabulary = model.config.block_size, model.config.vocab_size
    random_tokens = torch.Generator().manual_seed(here().rank)
    shape = (case.tokens // block, block + 1)
    drawn = torch.randint(vocabulary, shape, generator=random_tokens)
    x, y = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()  # (B, T)
    replica, optimizer = make(model)

    def step() -> None:
        optimizer.zero_grad()
        _, loss = replica(x, y)
        loss.backward()
        optimizer.step()

    return step
