"""The exercises of chapter 11: an order, a place for every W, ranks in a deadlock."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

from ddp_course.chapters.ch11_pipeline_schedules import solutions
from ddp_course.lab import orders
from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.orders import Rows
from ddp_course.pipeline import gpipe, interleaved, naive, one_f_one_b
from ddp_course.pipeline.schedule import Action, Schedule

# ---- my_one_f_one_b ----------------------------------------------------------------

# (ranks, microbatches)
SHAPES = ((2, 3), (4, 8), (3, 7), (4, 2), (1, 4), (5, 1), (3, 3), (2, 12), (12, 17))


@exercise("my_one_f_one_b", solution=solutions.my_one_f_one_b)
def check_my_one_f_one_b(answer: Answer) -> str:
    """`my_one_f_one_b(rank, num_ranks, num_microbatches)`: 1F1B's order of a rank.

    How many microbatches may be in flight on rank r, and which action makes them fewer?

    Count the forwards and backwards so far. While forwards are left, and fewer
    microbatches are in flight than ranks from this one to the last, take a forward;
    otherwise take a backward.
    """
    for p, m in SHAPES:
        rows = []
        for rank in range(p):
            rows.append(answer(rank, p, m))
            orders.judge_row(answer.call(rank, p, m), rows[-1], rank, "FB")
        where = f"For {p} rank{'s' * (p > 1)} and {m} microbatch{'es' * (m > 1)},"
        simulated = orders.judge_legal(where, rows, m)
        for rank, kept in enumerate(simulated.peak_activations):
            least = min(m, p - rank)
            expect(
                kept <= least,
                f"{where} rank {rank} has {kept} microbatches in flight at a time; "
                f"{least} are enough to keep it busy. Go backward as soon as {least} "
                "are in flight.",
            )
        orders.judge_bubble(where, simulated, Fraction(p - 1, m + p - 1), "GPipe's")
    orders.judge_training([answer(rank, 4, 8) for rank in range(4)])
    return (
        f"{len(SHAPES)} pipelines: legal, GPipe's bubble, activations of min(m, p - r) "
        "microbatches; and 4 real ranks trained in your order, with the gradients of "
        "one process"
    )


# ---- place_weights -----------------------------------------------------------------

# (ranks, microbatches), with at least one microbatch per rank
SPLIT = ((2, 3), (4, 8), (3, 3), (4, 5), (1, 2), (5, 9), (2, 12), (12, 13), (1, 101))


@exercise("place_weights", solution=solutions.place_weights)
def check_place_weights(answer: Answer) -> str:
    """`place_weights(row, rank)`: the row with a W for each I, where the rank waits.

    No rank waits for a W, so a W can fill a gap; but until it is done, its activation
    is kept. How many W's may rank r postpone without keeping more than rank 0?

    Keep a list of W's that are due. Each I adds its own W; when more than `rank` are
    due, put the oldest into the row at once. Put the remaining W's at the end of the
    row.
    """
    for p, m in SPLIT:
        rows = _placed(answer, p, m)
        where = f"For {p} rank{'s' * (p > 1)} and {m} microbatches,"
        simulated = orders.judge_legal(where, rows, m)
        for rank, kept in enumerate(simulated.peak_activations):
            expect(
                kept <= p,
                f"{where} rank {rank} keeps the activations of {kept} microbatches "
                f"from F to W; {p}, as on 1F1B's rank 0, are enough. Do not postpone "
                "more W's than fit into the rank's waiting time.",
            )
        share = Fraction(p - 1, 3 * m + p - 1)
        orders.judge_bubble(where, simulated, share, "zero-bubble's")
    orders.judge_training(_placed(answer, 4, 8))
    return (
        f"{len(SPLIT)} pipelines: legal, the order of F and I unchanged, bubble "
        "(p-1)(F+I-W), no more activations than 1F1B's rank 0; and 4 real ranks "
        "trained in this order, with the gradients of one process"
    )


def _placed(answer: Answer, p: int, m: int) -> Rows:
    """Call the answer for all ranks, and check each row."""
    rows = []
    for rank, actions in enumerate(one_f_one_b(p, m).ranks):
        argument = [str(action).replace("B", "I") for action in actions]
        before = list(argument)
        row = answer(argument, rank)
        call = answer.call(before, rank)
        expect(argument == before, f"{call} changed the list `row`.")
        orders.judge_row(call, row, rank, "FIW")
        expect(
            [action for action in row if "W" not in action] == before,
            f"{call} returned {code(one_line(row))}; without its W's it should equal "
            "the argument `row`: other ranks wait for F and I.",
        )
        rows.append(row)
    return rows


# ---- who_waits ---------------------------------------------------------------------

CHANGED = 66  # schedules in which two actions are exchanged, or one is missing


@exercise("who_waits", solution=solutions.who_waits)
def check_who_waits(answer: Answer) -> str:
    """`who_waits(rows)`: {rank: the action at which it waits for ever}, or {}.

    Time does not matter. What can each rank do now, and when does nothing change any
    more?

    Keep the set of finished actions, and a position in each row. Let every rank go on
    while its next action can run: an F needs the same microbatch's F one stage earlier;
    a B needs its own F, and the B one stage later unless it is the last stage. Repeat
    until no rank moves: a rank that is not at its end waits there for ever.
    """
    count = 0
    for title, rows in _schedules():
        argument = [list(row) for row in rows]
        got = answer(argument)
        wanted = solutions.who_waits(rows)
        shown = "; ".join(" ".join(row) for row in rows)
        where = f"For {title} (the ranks' rows are {code(one_line(shown, 300))})"
        expect(argument == rows, f"{where} your function changed the lists.")
        expect(
            isinstance(got, dict),
            f"{where} your function returned {code(one_line(got))}; expected a "
            "dictionary: rank -> the action at which it waits for ever.",
        )
        _judge(where, got, wanted, rows)
        count += 1
    return (
        f"{count} schedules, from naive to interleaved: correct ones, and some with "
        "two actions exchanged or one missing"
    )


def _judge(where: str, got: dict[int, str], wanted: dict[int, str], rows: Rows) -> None:
    for rank in range(len(rows)):
        mine, its = got.get(rank), wanted.get(rank)
        if its is None:
            expect(
                rank not in got,
                f"{where} rank {rank} waits at {code(one_line(mine))}, you say; but "
                "it comes to its end, and is not named. Look at a rank again whenever "
                "another rank has gone on.",
            )
        elif mine != its:
            needs = " and ".join(map(str, _needs(Action.parse(its), rows)))
            said = code(one_line(mine)) if mine else "that it comes to its end"
            expect(
                False,
                f"{where} rank {rank} waits for ever at {code(its)}, which needs "
                f"{needs}; you say {said}.",
            )
    more = sorted(set(got) - set(range(len(rows))))
    expect(not more, f"{where} you name ranks {more}, which do not exist.")


def _schedules() -> Iterator[tuple[str, Rows]]:
    """Yield (description, rows of a schedule), legal and illegal ones."""
    examples = [naive(3, 2), gpipe(2, 3), one_f_one_b(4, 6), interleaved(2, 4, 2)]
    examples += [gpipe(1, 2), one_f_one_b(2, 12), gpipe(12, 1)]
    for schedule in examples:
        yield f"the correct {schedule.name}", _rows(schedule)
        yield f"{schedule.name} with the ranks in reverse order", _rows(schedule)[::-1]
    yield "a rank without actions", [["0F0", "0B0"], []]
    v_shaped = ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"]
    yield "stages in the shape of a V", [row.split() for row in v_shaped]
    yield "a last stage without a forward", [["0F0", "0B0"], ["1B0"]]
    yield "a last stage without a backward", [["0F0", "0B0"], ["1F0"]]
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0"]]
    yield "a microbatch that the last stage never runs", rows
    rows = [["0F0", "0B0"], [], ["1F0", "1F1", "1B0"]]
    yield "a rank that waits, after a rank without actions", rows
    rows = [["0F10", "0B10"], ["1F1", "1F10", "1B10"]]
    yield "a microbatch that stage 0 never runs", rows
    yield "a schedule without stage 0", [["1F0", "1B0"], ["2F0", "2B0"]]
    yield "a schedule without stage 1", [["0F0", "0B0"], ["2F0", "2B0"]]
    rows = [[a for a in row if a != "10B0"] for row in _rows(gpipe(12, 1))]
    yield "the gpipe of 12 ranks without 10B0", rows
    long = _rows(one_f_one_b(2, 600))
    yield "a long schedule", long
    shorter = [long[0][:-3] + long[0][-2:], long[1]]
    yield "a long schedule without its last forward", shorter
    dice = random.Random(0)
    for number in range(CHANGED):
        schedule = examples[5 if number >= 60 else number % 4]
        rows = _rows(schedule)[:: -1 if number % 5 == 0 else 1]
        row = dice.choice(rows)
        a, b = sorted(dice.sample(range(len(row)), 2))
        if number % 3:
            row[a], row[b] = row[b], row[a]
            yield f"{schedule.name} with {row[b]} and {row[a]} exchanged", rows
        else:
            yield f"{schedule.name} without {row.pop(a)}", rows


def _rows(schedule: Schedule) -> Rows:
    return [[str(action) for action in row] for row in schedule.ranks]


def _needs(action: Action, rows: Rows) -> tuple[Action, ...]:
    ranks = tuple(tuple(map(Action.parse, row)) for row in rows)
    stages = 1 + max(a.stage for row in ranks for a in row)
    return Schedule("", stages, 99, ranks).needs(action)
