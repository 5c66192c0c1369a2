"""The exercises of chapter 11: an order, a place for every W, who waits for ever."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ddp_course.chapters.ch11_pipeline_schedules import solutions
from ddp_course.lab.answers import Answer, code, on_ranks, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.measure import ByteMeter, EventLog
from ddp_course.pipeline import PipelineParallel
from ddp_course.pipeline.checker import check
from ddp_course.pipeline.schedule import Action, Schedule, ScheduleError, parse
from ddp_course.pipeline.schedules import gpipe, interleaved, naive, one_f_one_b
from ddp_course.pipeline.simulate import Simulated, simulate

Rows = list[list[str]]

# ---- my_one_f_one_b ----------------------------------------------------------------

# Ranks and microbatches.
SHAPES = ((2, 3), (4, 8), (3, 7), (4, 2), (1, 4), (5, 1), (2, 12))


@exercise("my_one_f_one_b", solution=solutions.my_one_f_one_b)
def check_my_one_f_one_b(answer: Answer) -> str:
    """`my_one_f_one_b(rank, num_ranks, num_microbatches)`: 1F1B's order of a rank."""
    for p, m in SHAPES:
        rows = []
        for rank in range(p):
            row = answer(rank, p, m)
            where = f"{answer.call(rank, p, m)} returned {code(one_line(row))}"
            _judge_row(where, row, rank, "FB")
            rows.append(row)
        where = f"For {p} ranks and {m} microbatches,"
        played = _judge_legal(where, rows)
        for rank, kept in enumerate(played.peak_activations):
            least = min(m, p - rank)
            expect(
                kept <= least,
                f"{where} rank {rank} has {kept} microbatches in flight at a time; "
                f"{least} are enough to keep it busy. Go backward as soon as so many "
                "are in flight.",
            )
        _judge_bubble(where, played, Fraction(p - 1, m + p - 1), "GPipe's")
    judge_on_ranks([answer(rank, 4, 8) for rank in range(4)])
    return (
        f"{len(SHAPES)} pipelines: legal, GPipe's bubble, activations of min(m, p - r) "
        "microbatches; and 4 real ranks trained by your order, with the gradients of "
        "one process"
    )


def _judge_row(where: str, row: Any, rank: int, ops: str) -> None:
    """Look whether these are actions of stage `rank`."""
    expect(
        isinstance(row, list) and all(isinstance(action, str) for action in row),
        f"{where}; expected a list of strings, as in {code(repr(['0F0', '0B0']))}.",
    )
    for text in row:
        try:
            action = Action.parse(text)
        except ValueError:
            expect(False, f"{where}; {code(text)} is no action.")
        expect(
            action.op in ops and action.stage == rank,
            f"{where}; {code(text)} does not belong there: rank {rank} has stage "
            f"{rank}, and an action is one of {', '.join(ops)}.",
        )


def _judge_legal(where: str, rows: Rows) -> Simulated:
    """Let the checker judge; return what the simulator says."""
    try:
        expect(any(rows), f"{where} no rank does anything.")
        schedule = parse("yours", [" ".join(row) for row in rows])
        check(schedule)
    except ScheduleError as error:
        said = str(error).removeprefix("yours: ")
        expect(False, f"{where} the checker says: {code(said)}.")
    return simulate(schedule)


def _judge_bubble(where: str, played: Simulated, wanted: Fraction, whose: str) -> None:
    expect(
        played.bubble <= wanted,
        f"{where} {float(played.bubble):.1%} of the time is idle; {whose} bubble is "
        f"{float(wanted):.1%}. Some rank waits although it could go on.",
    )


# ---- place_weights -----------------------------------------------------------------

SPLIT = (
    (2, 3),
    (4, 8),
    (3, 3),
    (4, 5),
    (1, 2),
    (5, 9),
    (2, 12),
)  # as many microbatches, or more


@exercise("place_weights", solution=solutions.place_weights)
def check_place_weights(answer: Answer) -> str:
    """`place_weights(row, rank)`: the row with its W's, where a rank would wait."""
    for p, m in SPLIT:
        rows = _placed(answer, p, m)
        where = f"For {p} ranks and {m} microbatches,"
        played = _judge_legal(where, rows)
        for rank, kept in enumerate(played.peak_activations):
            expect(
                kept <= p,
                f"{where} rank {rank} keeps what {kept} microbatches need, from F to "
                f"W; 1F1B's rank 0 has {p}, and that is enough here. Do not put off "
                "more W's than the rank has to wait.",
            )
        _judge_bubble(where, played, Fraction(p - 1, 3 * m + p - 1), "zero-bubble's")
    judge_on_ranks(_placed(answer, 4, 8))
    return (
        f"{len(SPLIT)} pipelines: legal, the order of F and I unchanged, bubble "
        "(p-1)(F+I-W), no more activations than 1F1B's rank 0; and 4 real ranks "
        "trained by it, with the gradients of one process"
    )


def _placed(answer: Answer, p: int, m: int) -> Rows:
    """Ask for the rows of all ranks, and look at each."""
    rows = []
    for rank, actions in enumerate(one_f_one_b(p, m).ranks):
        given = [str(action).replace("B", "I") for action in actions]
        before = list(given)
        row = answer(given, rank)
        where = f"{answer.call(before, rank)} returned {code(one_line(row))}"
        expect(given == before, f"{where}, and changed the list `row`.")
        _judge_row(where, row, rank, "FIW")
        expect(
            [action for action in row if "W" not in action] == before,
            f"{where}; without its W's that should be the row that was given, in its "
            "order: others wait for F and I.",
        )
        rows.append(row)
    return rows


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
    return {"order": actions, "gradient": weight.grad, "sent": meter.total_sent}


def _alone(p: int, m: int) -> list[Tensor]:
    """Return the gradient of each layer in one process with the whole batch."""
    model, (x, y) = _model(p), _batch(m)
    _loss(model(x), y).backward()
    return [layer.weight.grad for layer in model]


CHANGED = 66  # schedules in which two actions are exchanged, or one is missing


@exercise("who_waits", solution=solutions.who_waits)
def check_who_waits(answer: Answer) -> str:
    """`who_waits(rows)`: where each rank stands for ever; nothing if all can end."""
    count = 0
    for told, rows in _schedules():
        given = [list(row) for row in rows]
        got = answer(given)
        wanted = _stuck(rows)
        shown = "; ".join(" ".join(row) for row in rows)
        where = f"For {told} (the ranks' rows are {code(one_line(shown, 300))})"
        expect(given == rows, f"{where} your function changed the lists.")
        expect(
            isinstance(got, dict),
            f"{where} your function returned {code(one_line(got))}; expected a "
            "dictionary: rank -> the action at which it stands.",
        )
        _judge(where, got, wanted, rows)
        count += 1
    return (
        f"{count} schedules, from naive to interleaved, as they should be, with two "
        "actions exchanged, and with one missing: who stands where, and who comes to "
        "the end"
    )


def _judge(where: str, got: dict[int, str], wanted: dict[int, str], rows: Rows) -> None:
    for rank in range(len(rows)):
        mine, its = got.get(rank), wanted.get(rank)
        if mine == its:
            continue
        if its is None:
            expect(
                False,
                f"{where} rank {rank} stands at {code(one_line(mine))}, you say; but "
                "it comes to its end. Look at a rank again whenever another one has "
                "gone on.",
            )
        needs = " and ".join(map(str, _needs(Action.parse(its), rows)))
        expect(
            False,
            f"{where} rank {rank} stands at {code(its)} for ever, which needs {needs}; "
            f"you say {code(one_line(mine)) if mine else 'that it comes to its end'}.",
        )
    expect(
        set(got) <= set(range(len(rows))),
        f"{where} you name ranks {sorted(set(got) - set(range(len(rows))))}, which "
        "there are not.",
    )


def _schedules() -> Iterator[tuple[str, Rows]]:
    """Return schedules by what is to be said about them."""
    made = [
        naive(3, 2),
        gpipe(2, 3),
        one_f_one_b(4, 6),
        interleaved(2, 4, 2),
        gpipe(1, 2),
        one_f_one_b(2, 12),
    ]
    for schedule in made:
        yield f"{schedule.name} as it should be", _rows(schedule)
    dice = random.Random(0)
    for number in range(CHANGED):
        schedule = made[5 if number >= 60 else number % 4]
        rows = _rows(schedule)
        row = dice.choice(rows)
        a, b = sorted(dice.sample(range(len(row)), 2))
        if number % 3:
            row[a], row[b] = row[b], row[a]
            yield f"{schedule.name} with {row[b]} and {row[a]} exchanged", rows
        elif "B" in row[a]:
            yield f"{schedule.name} without {row.pop(a)}", rows


def _rows(schedule: Schedule) -> Rows:
    return [[str(action) for action in row] for row in schedule.ranks]


def _needs(action: Action, rows: Rows) -> tuple[Action, ...]:
    ranks = tuple(tuple(map(Action.parse, row)) for row in rows)
    stages = 1 + max(a.stage for row in ranks for a in row)
    return Schedule("", stages, 99, ranks).needs(action)


def _stuck(rows: Rows) -> dict[int, str]:
    """Say where each rank stands for ever."""
    done: set[str] = set()
    at = [0] * len(rows)
    going = True
    while going:
        going = False
        for rank, row in enumerate(rows):
            if at[rank] < len(row):
                needs = set(map(str, _needs(Action.parse(row[at[rank]]), rows)))
                if needs <= done:
                    done.add(row[at[rank]])
                    at[rank] += 1
                    going = True
    return {r: row[at[r]] for r, row in enumerate(rows) if at[r] < len(row)}
