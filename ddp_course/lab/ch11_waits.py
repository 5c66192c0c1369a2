"""An exercise of chapter 11: which ranks wait for ever, and at which action?"""

from __future__ import annotations

import random
from collections.abc import Iterator

from ddp_course.lab.answers import Answer, code, one_line
from ddp_course.lab.exercises import exercise, expect
from ddp_course.lab.solutions import ch11 as solutions
from ddp_course.pipeline.schedule import Action, Schedule
from ddp_course.pipeline.schedules import gpipe, interleaved, naive, one_f_one_b

Rows = list[list[str]]
CHANGED = 60  # schedules in which two actions are exchanged, or one is missing


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
    ]
    for schedule in made:
        yield f"{schedule.name} as it should be", _rows(schedule)
    dice = random.Random(0)
    for number in range(CHANGED):
        schedule = made[number % 4]
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
