"""The exercises of chapter 11: an order, a place for every W, who waits for ever."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.ch11_ranks import judge_on_ranks
from ddp_course.lab.ch11_waits import check_who_waits
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.solutions import ch11 as solutions
from ddp_course.pipeline.checker import check
from ddp_course.pipeline.schedule import Action, ScheduleError, parse
from ddp_course.pipeline.schedules import one_f_one_b
from ddp_course.pipeline.simulate import Simulated, simulate

__all__ = ["check_my_one_f_one_b", "check_place_weights", "check_who_waits"]

Rows = list[list[str]]

# ---- my_one_f_one_b ----------------------------------------------------------------

SHAPES = ((2, 3), (4, 8), (3, 7), (4, 2), (1, 4), (5, 1))  # ranks, microbatches


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
