"""Every planted wrong answer is rejected, with the hint that fits it."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from answer_lists import ANSWERS, EXERCISES, HANGING, OTHERS, each

from ddp_course.lab.exercises import NOT_YET


@pytest.fixture(scope="module", autouse=True)
def hanging(request) -> Iterator[dict[tuple, Future]]:
    """Check the answers that hang in the background, from the first test on."""
    chosen = [
        (item.callspec.params["name"], item.callspec.params["wrong"])
        for item in request.session.items
        if getattr(item, "originalname", "") == test_an_answer_that_hangs.__name__
    ]
    with ThreadPoolExecutor(len(chosen) or 1) as threads:
        yield {
            (name, wrong): threads.submit(EXERCISES[name], wrong)
            for name, wrong in chosen
        }


@each("wrong", OTHERS)
def test_a_wrong_answer_gets_its_hint(name, wrong):
    verdict = EXERCISES[name](wrong)
    assert verdict.status == NOT_YET, verdict
    assert ANSWERS[name][wrong] in verdict.message


@each("wrong", HANGING)
def test_an_answer_that_hangs(name, wrong, hanging):
    verdict = hanging[name, wrong].result()
    assert verdict.status == NOT_YET, verdict
    assert ANSWERS[name][wrong] in verdict.message
