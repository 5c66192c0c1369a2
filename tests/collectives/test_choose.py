"""The choice of an algorithm."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddp_course import collectives as ours
from ddp_course.collectives import CollectiveError, Selector, choose
from ddp_course.launch import spawn


@pytest.mark.parametrize(
    ("nodes", "shares", "nbytes", "cpu", "name"),
    [
        ([[0, 1, 2]], True, 4, True, "shared_memory"),
        ([[0, 1, 2]], True, 1 << 30, True, "shared_memory"),
        ([[0, 1, 2]], True, 1 << 30, False, "ring"),  # GPUs
        ([[0, 1, 2]], False, 4, True, "tree"),
        ([[0, 1, 2]], False, 1 << 20, True, "ring"),
        ([[0, 1], [2, 3]], True, 4, True, "hierarchical"),
        ([[0, 1], [2]], True, 1 << 20, True, "ring"),
        ([[0], [1]], False, 1 << 20, True, "ring"),
        ([[0], [1]], False, 8, True, "tree"),
    ],
)
def test_the_rule(nodes, shares, nbytes, cpu, name):
    group = SimpleNamespace(nodes=nodes, shares_memory=shares)
    assert choose.rule(group, nbytes, cpu) == name


def chosen() -> list:
    x = torch.tensor([1.0])
    ours.all_reduce(x)
    ours.all_reduce(x, algorithm="naive")
    try:
        ours.all_reduce(x, algorithm="star")
    except CollectiveError as error:
        return [x.item(), str(error)]
    return []


def test_by_name_or_by_rule():
    told = spawn(chosen, world_size=2, output="none")
    assert told[0][0] == 4.0
    assert told[0][1] == told[1][1] and (
        "algorithm is 'star'; it can be auto, naive, tree, halving_doubling, ring, "
        "hierarchical, shared_memory" in told[0][1]
    )


TIMES = {"ring": {10: 5.0, 1000: 6.0, 100: 5.5}, "tree": {10: 1.0, 100: 2.0, 1000: 9}}


def test_a_selector_takes_the_fastest():
    selector = Selector.of(TIMES)
    assert selector.best == ((10, "tree"), (100, "tree"), (1000, "ring"))
    assert [selector(n) for n in (0, 10, 99, 100, 101, 5000)] == ["tree"] * 4 + [
        "ring",
        "ring",
    ]
    with pytest.raises(ValueError, match="no size was measured for all"):
        Selector.of({"ring": {1: 1.0}, "tree": {2: 1.0}})
