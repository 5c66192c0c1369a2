"""A judge rejects all mutants of its solution that are not equivalent to it.

CI tries a part, drawn by a seed. All of them: `DDP_COURSE_MUTANTS=all pytest -n 0
tests/chapters/test_mutants.py`, some ten minutes; another part: any other word.
"""

import os
import random
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from answer_lists import EXERCISES, ON_RANKS
from mutants import mutants
from survivors import ORDER, REVERSED, SURVIVORS

from ddp_course.lab import answers, messages
from ddp_course.lab.exercises import NOT_YET, PASSED, exercise, expect

WHICH = os.environ.get("DDP_COURSE_MUTANTS", "CI")
HERE = [name for name in EXERCISES if name not in ON_RANKS]


def chosen(name: str, number: int) -> list:
    """Return mutants of an exercise's solution: some of them, or all."""
    every = list(mutants(EXERCISES[name].reference))
    dice = random.Random(f"{WHICH} {name}")
    return every if WHICH == "all" else dice.sample(every, min(number, len(every)))


def is_equivalent(name: str, words: str) -> bool:
    """Tell whether a mutant is on the list of those that are right."""
    for (exercise_name, begin), reason in SURVIVORS.items():
        if exercise_name == name and words.startswith(begin):
            return reason != ORDER or REVERSED in words or len(words) > 130
    return False


@pytest.fixture(autouse=True)
def impatient():
    """Wait less long for mutants that hang; those that must pass do not."""
    with mock.patch.object(answers, "TIMEOUT", 5.0):
        with mock.patch.object(messages, "PATIENCE", 2.0):
            yield


def survivors(name: str, number: int) -> list[str]:
    """Return the mutants that are accepted and not known to be equivalent."""
    todo = [one for one in chosen(name, number) if not is_equivalent(name, one[0])]
    if name in ON_RANKS:  # they often hang: side by side, they wait at the same time
        with ThreadPoolExecutor(4) as threads:
            verdicts = list(threads.map(lambda one: EXERCISES[name](one[1]), todo))
    else:  # an endless loop is ended by an alarm, which the main thread alone hears
        verdicts = [EXERCISES[name](mutant) for _, mutant in todo]
    pairs = zip(todo, verdicts, strict=True)
    return [words for (words, _), verdict in pairs if verdict.status == PASSED]


def test_every_exercise_on_ranks_exists():
    assert {*ON_RANKS} <= {*EXERCISES}


@pytest.mark.parametrize("name", HERE)
def test_a_judge_rejects_mutants_of_its_solution(name):
    assert survivors(name, 6) == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_judge_on_ranks_rejects_mutants_of_its_solution(name):
    assert survivors(name, 1) == []


@pytest.mark.skipif(WHICH != "all", reason="with DDP_COURSE_MUTANTS=all")
def test_every_survivor_is_a_mutant():
    known = [(name, words) for name in HERE + ON_RANKS for words, _ in chosen(name, 0)]
    for name, begin in SURVIVORS:
        assert any(n == name and words.startswith(begin) for n, words in known), begin


def average(numbers: list[float]) -> float:
    """The solution of the test below."""
    return sum(numbers) / len(numbers)


def test_a_judge_with_one_size_lets_mutants_pass():
    @exercise("average", solution=average)
    def weak(answer):
        """`average(numbers)`: their mean."""
        expect(answer([1.0, 3.0]) == 2, hint="The mean of 1 and 3 is 2.")
        return "a mean of two"

    found = {words.partition(" (")[0]: mutant for words, mutant in mutants(average)}
    assert weak(found["len(numbers) -> 2"]).status == PASSED
    assert weak(found["len(numbers) -> 3"]).status == NOT_YET
    assert weak(average).status == PASSED
