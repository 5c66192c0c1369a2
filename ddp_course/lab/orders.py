"""Judge a pipeline schedule that a reader wrote: is it legal, fast, and does it train?

`rows` has, for each rank, a list of actions such as "0F1": stage, operation (F, B, I or
W), and microbatch. Rank r has stage r. Chapters 10 and 11.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.lab.answers import code, on_ranks, one_line
from ddp_course.lab.exercises import expect
from ddp_course.measure import ByteMeter, EventLog
from ddp_course.pipeline import PipelineParallel, PipelineRecorder, parse
from ddp_course.pipeline.checker import check
from ddp_course.pipeline.schedule import Action, Schedule, ScheduleError
from ddp_course.pipeline.simulate import SimulatedSchedule, simulate_schedule

Rows = list[list[str]]
# The width of a layer and the rows of a microbatch; powers of 2 avoid rounding.
WIDTH, ROWS = 4, 2
FLOAT = 4  # bytes


def judge_row(call: str, row: Any, rank: int, ops: str) -> None:
    """Raise a Hint unless `row`, which `call` returned, has actions of stage `rank`."""
    where = f"{call} returned {code(one_line(row))}"
    expect(
        isinstance(row, list) and all(isinstance(action, str) for action in row),
        f"{where}; expected a list of strings, as in {code(repr(['0F0', '0B0']))}.",
    )
    for text in row:
        try:
            action = Action.parse(text)
        except ValueError:
            expect(
                False,
                f"{where}; {code(text)} is not an action: write stage, operation and "
                f"microbatch, as in {code('0F1')}.",
            )
        expect(
            action.op in ops and action.stage == rank,
            f"{where}; {code(text)} does not belong there: rank {rank} has stage "
            f"{rank}, and an action is one of {', '.join(ops)}.",
        )


def judge_legal(where: str, rows: Rows, num_microbatches: int) -> SimulatedSchedule:
    """Raise a Hint unless the checker finds the rows legal; return the simulation."""
    try:
        expect(any(rows), f"{where} no rank does anything.")
        schedule = parse("yours", [" ".join(row) for row in rows])
        check(schedule)
    except ScheduleError as error:
        said = str(error).removeprefix("yours: ")
        expect(False, f"{where} the checker says: {code(said)}.")
    expect(
        schedule.num_microbatches == num_microbatches,
        f"{where} your ranks have actions of {schedule.num_microbatches} microbatches; "
        "the next batch's microbatches have to wait for the step.",
    )
    return simulate_schedule(schedule)


def judge_bubble(
    where: str, simulated: SimulatedSchedule, wanted: Fraction, owner: str
) -> None:
    """Raise a Hint if the bubble is larger than `wanted`, the bubble of `owner`."""
    expect(
        simulated.bubble <= wanted,
        f"{where} {float(simulated.bubble):.1%} of the time is idle; {owner} bubble is "
        f"{float(wanted):.1%}. Some rank waits although it could go on: are the "
        "microbatches in the same order on all ranks?",
    )


def judge_training(rows: Rows) -> None:
    """Train on real ranks with this schedule; check order, gradients and bytes."""
    p = len(rows)
    schedule = parse("yours", [" ".join(row) for row in rows])
    m = schedule.num_microbatches
    hint = "The checker found your order legal, yet the ranks do not finish."
    alone = _alone(p, m)
    for rank, result in enumerate(on_ranks(_train, schedule, world_size=p, hint=hint)):
        where, row = f"On {p} real ranks, rank {rank}", rows[rank]
        expect(
            result["order"] == row,
            f"{where} ran {code(' '.join(result['order']))}; your order was "
            f"{code(' '.join(row))}.",
        )
        expect(
            torch.equal(result["gradient"], alone[rank]),
            f"{where} got a wrong gradient: one process with the whole batch has "
            "another.",
        )
        neighbours = (rank > 0) + (rank < p - 1)
        to = "1 neighbour" if neighbours == 1 else f"{neighbours} neighbours"
        wanted = neighbours * m * ROWS * WIDTH * FLOAT
        expect(
            result["sent"] == wanted,
            f"{where} sent {result['sent']} bytes; {m} microbatches to {to} "
            f"are {wanted}.",
        )


def whole_numbers(layer: nn.Module, seed: int) -> nn.Module:
    """Set the layer's weights to small integers, so that no sum is rounded."""
    dice = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape, generator=dice).float()
    return layer


def _model(p: int) -> nn.Sequential:
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(p))
    return nn.Sequential(*(whole_numbers(layer, k) for k, layer in enumerate(layers)))


def _batch(m: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    shape = m * ROWS, WIDTH
    x, y = (torch.randint(-2, 3, shape, generator=dice).float() for _ in "xy")
    return x, y


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over rows of a product; its gradients are integers / rows."""
    return (output * targets).sum() / len(output)


def _train(schedule: Schedule) -> dict[str, Any]:
    """Train on this rank; return order, gradient and sent bytes of the second step.

    (In the first step, ranks also send the shapes of their activations.)
    """
    p, m = schedule.num_ranks, schedule.num_microbatches
    recorder = PipelineRecorder()
    pipeline = PipelineParallel(_model(p), schedule, loss_fn=_loss, recorder=recorder)
    pipeline.step(*_batch(m))
    pipeline.zero_grad()
    with EventLog() as log, ByteMeter() as meter:
        pipeline.step(*_batch(m))
    done = [event for event in log.events if event.lane == "compute"]
    actions = [f"{e.detail['stage']}{e.op}{e.detail['microbatch']}" for e in done]
    (weight,) = pipeline.parameters()
    return {"order": actions, "gradient": weight.grad, "sent": meter.total_sent}


def _alone(p: int, m: int) -> list[Tensor]:
    """Return the gradient of each layer in one process with the whole batch."""
    model, (x, y) = _model(p), _batch(m)
    _loss(model(x), y).backward()
    return [layer.weight.grad for layer in model]
