"""Every solution passes, and every right answer in another style."""

import re
from unittest import mock

import pytest
from answer_lists import EXERCISES, RIGHT, each

from ddp_course.lab import answers
from ddp_course.lab.exercises import PASSED


@pytest.fixture(autouse=True)
def in_no_hurry():
    """Give answers time, also on a busy machine: those that must pass never hang."""
    with mock.patch.object(answers, "TIMEOUT", 100.0):
        yield


@pytest.mark.parametrize("name", EXERCISES)
def test_the_solution_passes(name):
    verdict = EXERCISES[name](EXERCISES[name].reference)
    assert verdict.status == PASSED, verdict
    assert re.fullmatch(r"Verified: .{20,}\.", verdict.message)


@each("right", RIGHT)
def test_a_right_answer_in_another_style_passes(name, right):
    verdict = EXERCISES[name](right)
    assert verdict.status == PASSED, verdict
