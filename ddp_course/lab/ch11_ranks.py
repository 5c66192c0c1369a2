"""For the exercises of chapter 11: real ranks train by the reader's rows of actions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.lab.answers import code, on_ranks
from ddp_course.lab.exercises import expect
from ddp_course.measure import ByteMeter, EventLog
from ddp_course.pipeline import PipelineParallel
from ddp_course.pipeline.schedule import Schedule, parse

WIDTH, ROWS = 4, 2  # of the layers, and of each microbatch; powers of 2: no rounding
FLOAT = 4  # bytes


def judge_on_ranks(rows: list[list[str]]) -> None:
    """Let real ranks train by the rows; compare what they did and what came out."""
    p = len(rows)
    schedule = parse("yours", [" ".join(row) for row in rows])
    m = schedule.num_microbatches
    hint = "The checker found your order legal, yet the ranks do not finish."
    alone = _alone(p, m)
    for rank, told in enumerate(on_ranks(_train, schedule, world_size=p, hint=hint)):
        where, row = f"On {p} real ranks, rank {rank}", rows[rank]
        expect(
            told["order"] == row,
            f"{where} ran {code(' '.join(told['order']))}; your order was "
            f"{code(' '.join(row))}.",
        )
        expect(
            torch.equal(told["gradient"], alone[rank]),
            f"{where} got another gradient than one process with the whole batch.",
        )
        neighbours = (rank > 0) + (rank < p - 1)
        wanted = neighbours * m * ROWS * WIDTH * FLOAT
        expect(
            told["sent"] == wanted,
            f"{where} sent {told['sent']} bytes; {m} microbatches to {neighbours} "
            f"neighbours are {wanted}.",
        )


def _model(p: int) -> nn.Sequential:
    """Return p layers with small integers as weights: no sum of theirs is rounded."""
    dice = torch.Generator().manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(p)]
    for layer in layers:
        whole = torch.randint(-1, 2, (WIDTH, WIDTH), generator=dice)
        layer.weight.data.copy_(whole)
    return nn.Sequential(*layers)


def _batch(m: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(1)
    shape = m * ROWS, WIDTH
    x, y = (torch.randint(-2, 3, shape, generator=dice).float() for _ in "xy")
    return x, y


def _loss(output: Tensor, targets: Tensor) -> Tensor:
    """The mean over rows of a product: its gradients are integers / rows."""
    return (output * targets).sum() / len(output)


def _train(schedule: Schedule) -> dict[str, Any]:
    """On every rank: what is computed, sent and found in the second step.

    (Before the first message of a kind, its shape is told.)
    """
    p, m = schedule.num_ranks, schedule.num_microbatches
    pipeline = PipelineParallel(_model(p), schedule, loss_fn=_loss)
    x, y = _batch(m)
    pipeline.step(x, y)
    pipeline.zero_grad()
    with EventLog() as log, ByteMeter() as meter:
        pipeline.step(x, y)
    done = [event for event in log.events if event.lane == "compute"]
    actions = [f"{e.detail['stage']}{e.op}{e.detail['microbatch']}" for e in done]
    (weight,) = pipeline.parameters()
    return {
        "order": actions,
        "gradient": weight.grad,
        "sent": meter.total_sent,
    }


def _alone(p: int, m: int) -> list[Tensor]:
    """Return the gradient of each layer in one process with the whole batch."""
    model, (x, y) = _model(p), _batch(m)
    _loss(model(x), y).backward()
    return [layer.weight.grad for layer in model]
