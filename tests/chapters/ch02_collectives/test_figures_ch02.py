"""The figures of chapter 02 show what they are about, and nothing else."""

import itertools
import re

import pytest
from drawings import laid_out, words
from refusals import refused

from ddp_course.chapters.ch02_collectives.figures import (
    COLLECTIVES,
    before_after,
    collectives,
    deadlock,
)
from ddp_course.collectives.catalog import PLANS

SIZES = (1, 2, 3, 4, 5, 8)


test_the_layout = laid_out(
    collectives,
    deadlock,
    (before_after, COLLECTIVES),
    (before_after, itertools.product(("all_reduce, ring", "all_to_all"), SIZES)),
)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_before_and_after(name):
    plan = next(make(4) for key, make in PLANS.items() if key.split(",")[0] == name)
    d = before_after(name)
    everyone = [sum(chunk in has for has in plan.start) for chunk in range(plan.chunks)]
    blocks = sum(map(len, plan.start)) + sum(
        everyone[chunk] for has in plan.end for chunk in has
    )
    own = re.compile(r"\d(→\d)?")
    assert sum(bool(own.fullmatch(w)) for w in words(d)) == blocks + 4  # ranks' names
    assert name in words(d)
    assert name in words(collectives())
    assert f"{name}. Before: rank 0: " in d.description


def test_deadlock_calls():
    said = words(deadlock())
    assert said.count("never called") == 2
    assert said.count("send to 1") == said.count("recv from 1") - 1 == 2
    assert deadlock().svg().count("<polygon") == 4  # nothing arrives on the left


test_what_cannot_be_drawn = refused(
    (lambda: before_after("all"), "name is 'all'; .* 'all_reduce'"),
    (lambda: before_after("scatter", 9), "world_size is 9; .* 1 to 8"),
)
