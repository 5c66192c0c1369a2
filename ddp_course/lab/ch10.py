"""The exercises of chapter 10: a schedule, a cut, and what a loss counts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.lab.answers import Answer, code, error_line, on_ranks, one_line
from ddp_course.lab.ch10_steps import check_my_stage_step
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.solutions import ch10 as solutions
from ddp_course.measure import ByteMeter
from ddp_course.pipeline import (
    PipelineParallel,
    Schedule,
    ScheduleError,
    check,
    parse,
    simulate,
)

__all__ = [
    "check_microbatch_loss",
    "check_my_cut",
    "check_my_gpipe",
    "check_my_stage_step",
]

# ---- my_gpipe ----------------------------------------------------------------------

PIPELINES = ((2, 3), (1, 2), (3, 1), (4, 4), (3, 7))  # stages and microbatches
WIDTH, ROWS = 4, 6


@exercise("my_gpipe", solution=solutions.my_gpipe)
def check_my_gpipe(answer: Answer) -> str:
    """`my_gpipe(num_stages, num_microbatches, rank)`: what a rank does, in order."""
    for p, m in PIPELINES:
        rows = [answer(p, m, rank) for rank in range(p)]
        for rank, row in enumerate(rows):
            _judge_row(answer.call(p, m, rank), row, rank, m)
        _judge_schedule(f"With {p} stages and {m} microbatches", _as_one(rows), p, m)
    for p, m in ((3, 3), (2, 1)):
        rows = [answer(p, m, rank) for rank in range(p)]
        real = on_ranks(_run_schedule, _as_one(rows), world_size=p)
        alone = _run_alone()
        for rank, told in enumerate(real):
            where = f"On {p} real ranks with {m} microbatches, rank {rank}"
            _judge_run(where, told, alone, p, m)
    return (
        f"{len(PIPELINES)} pipelines: legal, all forwards first, and no more waiting "
        "than (p-1)/(m+p-1) of the time; on real ranks the gradients of one process"
    )


def _judge_row(call: str, row: Any, rank: int, m: int) -> None:
    """Look at the form of what a rank does, and at its order."""
    fine = isinstance(row, list) and all(isinstance(one, str) for one in row)
    expect(
        fine,
        f"{call} returned {code(one_line(row))}; expected a list of actions in words, "
        "such as '0F1': stage, F or B, microbatch.",
    )
    for one in row:
        try:
            parse("", [one])
        except ValueError as error:
            expect(False, f"{call} has {code(repr(one))}: {error_line(error)}")
    others = [one for one in row if not one.startswith((f"{rank}F", f"{rank}B"))]
    expect(
        not others,
        f"{call} has {code(repr((others or [''])[0]))}; rank {rank} has stage {rank} "
        "alone, and its actions are F and B.",
    )
    ops = "".join(one[len(f"{rank}")] for one in row)
    expect(
        "BF" not in ops,
        f"{call} returned {code(' '.join(row))}, where a backward comes before a "
        "forward; in GPipe the forwards of all microbatches come first.",
    )


def _as_one(rows: Sequence[list[str]]) -> Schedule:
    return parse("yours", [" ".join(row) for row in rows])


def _judge_schedule(where: str, schedule: Schedule, p: int, m: int) -> None:
    """Let the checker judge, and the simulator count the waiting."""
    expect(
        (schedule.num_stages, schedule.num_microbatches) == (p, m),
        f"{where} your ranks have actions of {schedule.num_stages} stages and "
        f"{schedule.num_microbatches} microbatches; both are counted from 0.",
    )
    try:
        check(schedule)
    except ScheduleError as error:
        expect(False, f"{where} the checker says: {error}.")
    bubble, least = simulate(schedule).bubble, Fraction(p - 1, m + p - 1)
    expect(
        bubble == least,
        f"{where} your ranks wait for {bubble} of the time; {least} is enough. Is the "
        "order of the backwards the same on all ranks?",
    )


def _model() -> nn.Sequential:
    """Return four layers whose numbers are small integers: no sum is ever rounded."""
    dice = torch.Generator().manual_seed(0)
    layers = []
    for _ in range(4):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        numbers = torch.randint(-2, 3, (WIDTH, WIDTH), generator=dice)
        layer.weight.data.copy_(numbers)
        layers.append(layer)
    return nn.Sequential(*layers)


def _batch() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    return tuple(
        torch.randint(-3, 4, (ROWS, WIDTH), generator=dice).float() for _ in range(2)
    )


def _loss(y: Tensor, targets: Tensor) -> Tensor:
    return (y * targets).sum(1).mean()


def _run_schedule(schedule: Schedule) -> dict[str, Any]:
    """On every rank: one step of the reader's schedule."""
    pipeline = PipelineParallel(_model(), schedule, loss_fn=_loss)
    with ByteMeter() as meter:
        pipeline.step(*_batch())
    gradients = {name: p.grad for name, p in pipeline.named_parameters()}
    return {"gradients": gradients, "messages": meter.total_messages}


def _run_alone() -> dict[str, Tensor]:
    model = _model()
    x, targets = _batch()
    _loss(model(x), targets).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _judge_run(
    where: str, told: dict[str, Any], alone: dict[str, Tensor], p: int, m: int
) -> None:
    for name, gradient in told["gradients"].items():
        right = gradient is not None and torch.allclose(gradient, alone[name])
        expect(right, f"{where} has another gradient of {name} than one process.")


# ---- my_cut ------------------------------------------------------------------------

COSTS = (
    ([1, 1, 1, 1], 2),
    ([1, 8, 8, 8, 8, 6], 4),  # a GPT: the embedding costs nearly nothing
    ([1, 4, 4, 4, 4, 12], 3),  # and with a large vocabulary
    ([5, 5, 2, 3, 5, 5, 2], 3),
    ([7, 2, 5, 10, 8], 2),
    ([9, 1, 1, 1, 1, 1, 1], 3),
    ([1, 1, 1, 9], 4),
    ([2, 9, 5, 4], 3),
    ([2, 4, 4, 2, 8, 4], 3),
    ([3], 1),
    ([2, 3, 5, 7, 11, 13, 17, 19, 23], 4),
)


@exercise("my_cut", solution=solutions.my_cut)
def check_my_cut(answer: Answer) -> str:
    """`my_cut(costs, num_stages)`: how many layers each stage has."""
    for costs, stages in COSTS:
        given = list(costs)
        got = answer(given, stages)
        call = answer.call(costs, stages)
        _judge_sizes(call, got, costs, stages)
        dearest, least = _dearest(costs, got), _least(costs, stages)
        expect(
            dearest == least,
            f"{call} returned {code(repr(got))}: the dearest stage costs {dearest}, "
            f"and all others wait for it; it can be {least}.",
        )
        expect(given == costs, f"{call} changed the list that it was given.")
    return f"{len(COSTS)} models, each with the smallest possible dearest stage"


def _judge_sizes(call: str, got: Any, costs: Sequence[int], stages: int) -> None:
    fine = isinstance(got, list) and all(type(size) is int for size in got)
    expect(
        fine,
        f"{call} returned {code(one_line(got))}; expected a list with the number of "
        "layers of each stage.",
    )
    expect(
        len(got) == stages,
        f"{call} returned {code(repr(got))}, which has {len(got)} stages; expected "
        f"{stages}.",
    )
    expect(
        min(got) >= 1,
        f"{call} returned {code(repr(got))}: a stage without layers is a rank without "
        "work.",
    )
    expect(
        sum(got) == len(costs),
        f"{call} returned {code(repr(got))}, together {sum(got)} layers; the model has "
        f"{len(costs)}.",
    )


def _dearest(costs: Sequence[int], sizes: Sequence[int]) -> int:
    ends = list(itertools.accumulate(sizes))
    return max(
        sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)
    )


def _least(costs: Sequence[int], stages: int) -> int:
    """Return the least cost of the dearest stage, by trying all cuts."""
    found = []
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        ends = (0, *cuts, len(costs))
        found.append(_dearest(costs, [b - a for a, b in itertools.pairwise(ends)]))
    return min(found)


# ---- microbatch_loss ---------------------------------------------------------------

LENGTH, VOCABULARY = 5, 7
COUNTED = (  # for each row of the batch, how many targets count
    (5, 5, 5, 5),
    (5, 1, 3, 2),
    (0, 5, 0, 1),
    (2, 0, 0, 0, 4, 4),
)


@exercise("microbatch_loss", solution=solutions.microbatch_loss)
def check_microbatch_loss(answer: Answer) -> str:
    """`microbatch_loss(logits, targets, counted)`: its part of the batch's loss."""
    for lengths, m in itertools.product(COUNTED, (1, 2, 4)):
        logits, targets = _texts(lengths)
        counted = sum(lengths)
        where = f"With {lengths} targets that count in the rows, {m} microbatches:"
        whole = logits.clone().requires_grad_()
        wanted = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
        wanted.backward()
        mine = logits.clone().requires_grad_()
        given = [part.clone() for part in targets.tensor_split(m)]
        parts = zip(mine.tensor_split(m), given, strict=True)
        losses = [answer(x, y, counted) for x, y in parts]
        untouched = torch.equal(torch.cat(given), targets)
        expect(untouched, f"{where} your function changed the targets.")
        _judge_losses(where, losses, wanted)
        sum(losses).backward()
        expect(
            mine.grad is not None and torch.allclose(mine.grad, whole.grad, atol=1e-7),
            f"{where} the sum is right, and its gradient is not that of the whole "
            "batch's loss.",
        )
    return (
        f"{len(COUNTED)} batches in 1, 2 and 4 microbatches, some without a target "
        "that counts: the loss and the gradient of the whole batch"
    )


def _texts(lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return logits and targets; behind a row's length, targets do not count."""
    dice = torch.Generator().manual_seed(len(lengths))
    shape = len(lengths), LENGTH
    logits = torch.randn(*shape, VOCABULARY, generator=dice)
    targets = torch.randint(0, VOCABULARY, shape, generator=dice)
    for row, length in enumerate(lengths):
        targets[row, length:] = -100
    return logits, targets


def _judge_losses(where: str, losses: Sequence[Any], wanted: Tensor) -> None:
    for loss in losses:
        fine = isinstance(loss, Tensor) and loss.ndim == 0 and loss.requires_grad
        expect(
            fine,
            f"{where} your function returned {code(one_line(loss))}; expected a scalar "
            "tensor through which backward can go.",
        )
    told = ", ".join(f"{loss.item():.4g}" for loss in losses)
    expect(
        all(torch.isfinite(loss) for loss in losses),
        f"{where} the parts are {told}. A mean over no target at all is 0 / 0.",
    )
    ratio = sum(losses).item() / wanted.item()
    expect(
        abs(ratio - 1) < 1e-5,
        f"{where} the parts are {told}, in all {ratio:.3f} times the mean over all "
        "targets that count. A part must count as much as it has targets.",
    )
