"""Failure rates: published counts, and the first failure of many devices."""

import math
from random import Random

import pytest
from refusals import refused

from ddp_course.failures.rates import (
    LLAMA_3,
    PUBLISHED,
    first_failure,
    mean_time,
)

BY_NAME = {count.name: count for count in PUBLISHED}


def test_llama_3_was_interrupted_every_three_hours():
    llama = BY_NAME["Llama 3 405B"]
    assert sum(LLAMA_3.values()) == llama.failures == 419
    assert round(llama.one, -2) == 50_700
    assert mean_time(llama.one, 16_384) == pytest.approx(54 * 24 / 419)
    assert round(llama.one / 24 / 365, 1) == 5.8  # years of one GPU


@pytest.mark.parametrize(
    ("name", "gpus", "hours"),
    [("Meta RSC-1", 16_384, 1.8), ("Meta RSC-1", 1024, 28.8), ("BLOOM", 384, 168)],
)
def test_rates_are_those_that_were_published(name, gpus, hours):
    assert mean_time(BY_NAME[name].one, gpus) == pytest.approx(hours, rel=0.01)


@pytest.mark.parametrize("devices", [1, 10, 300])
def test_the_first_of_n_fails_n_times_as_soon(devices):
    dice = Random(devices)
    draws = [first_failure(devices, 50.0, dice) for _ in range(2000)]
    assert sum(draws) / 2000 == pytest.approx(50 / devices, rel=0.08)
    early = sum(draw < 20 / devices for draw in draws) / 2000
    assert early == pytest.approx(1 - math.exp(-20 / 50), abs=0.04)


test_what_cannot_be_is_told = refused(
    (lambda: mean_time(50_000, 0), "one is 50000 and devices 0; both must be above 0"),
    (lambda: mean_time(-2.0, 4), "one is -2.0 and devices 4; both must be above 0"),
)
