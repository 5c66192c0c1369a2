"""The closed forms of time, against a cluster played message by message."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import theory_simulator as simulator
from hypothesis import given
from hypothesis import strategies as st
from theory_simulator import BYTES, FREE, MESSAGES, play

from ddp_course import theory
from ddp_course.launch import Link, Links
from ddp_course.theory import Cost, HierarchicalCost

S = Fraction(1)
NAMES = [
    "broadcast_naive",
    "broadcast_tree",
    "scatter",
    "gather",
    "reduce_naive",
    "reduce_tree",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_reduce_naive",
    "all_reduce_tree",
    "all_reduce_halving_doubling",
    "all_reduce_ring",
]
EVERY_COST = [*NAMES, "all_reduce_double_tree"]
SHAPES = [(1, 1), (1, 5), (4, 1), (2, 2), (2, 4), (3, 3), (3, 4), (4, 3)]
MIXED = (Fraction(3), Fraction(5))


def check_cost(cost, program):
    """`cost` is what the clocks of `program` show, price by price and all together."""
    assert cost.messages == play(program, MESSAGES)[0]
    assert cost.nbytes == play(program, BYTES)[0]
    by_hand = cost.messages * MIXED[0] + cost.nbytes * MIXED[1]
    assert by_hand == play(program, MIXED)[0]


def check_hierarchical(cost, program):
    for one, prices in ((cost.inside, (1, 0)), (cost.between, (0, 1))):
        for price, value in (
            (MESSAGES, one.messages),
            (BYTES, one.nbytes),
        ):
            inside, between = (price if on else FREE for on in prices)
            assert value == play(program, inside, between)[0]


@pytest.mark.parametrize("n", [*range(1, 10), 16, 17])
@pytest.mark.parametrize("name", NAMES)
def test_a_cost_is_what_the_clocks_show(name, n):
    check_cost(getattr(theory, name)(n, S), getattr(simulator, name)(n))


def planted_ring(n, s):
    return Cost(2 * n, 2 * s)  # n steps where n-1 do


def planted_tree(n, s):
    steps = math.floor(math.log2(n))  # down where it must be up
    return Cost(2 * steps, 2 * steps * s)


def planted_naive(n, s):
    return Cost(2 * n, 2 * n * s)  # the root sends to itself


def planted_fold(n, s):
    p = 2 ** math.floor(math.log2(n))  # the other ranks are forgotten
    return theory.all_reduce_halving_doubling(p, s)


def planted_gather(n, s):
    return Cost(n - 1, s)  # the root's own part is sent, too


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("all_reduce_ring", planted_ring),
        ("all_reduce_tree", planted_tree),
        ("all_reduce_naive", planted_naive),
        ("all_reduce_halving_doubling", planted_fold),
        ("all_gather", planted_gather),
    ],
)
def test_wrong_costs_are_caught(name, planted):
    with pytest.raises(AssertionError):
        check_cost(planted(6, S), getattr(simulator, name)(6))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", ["leader", "sharded"])
def test_a_hierarchical_cost_is_what_the_clocks_show(variant, shape):
    program = getattr(simulator, f"hierarchical_{variant}")(*shape)
    check_hierarchical(theory.all_reduce_hierarchical(*shape, S, variant), program)


@pytest.mark.parametrize("variant", ["leader", "sharded"])
def test_a_wrong_hierarchical_cost_is_caught(variant):
    other = {"leader": "sharded", "sharded": "leader"}[variant]
    program = getattr(simulator, f"hierarchical_{variant}")(3, 4)
    right = theory.all_reduce_hierarchical(3, 4, S, variant)
    wrong = [
        theory.all_reduce_hierarchical(3, 4, S, other),
        theory.all_reduce_hierarchical(4, 3, S, variant),  # nodes and ranks swapped
        HierarchicalCost(right.inside, theory.all_reduce_ring(12, S)),
    ]
    for cost in wrong:
        with pytest.raises(AssertionError):
            check_hierarchical(cost, program)


def test_hierarchical_seconds_use_each_link_for_its_part():
    links = Links(inside=Link(0, 8), between=Link(5, 2))
    cost = HierarchicalCost(Cost(100, 16), Cost(2, 10))
    assert cost.seconds(links) == 16 / 8 + 2 * 5 + 10 / 2


def test_a_double_tree_sends_all_of_it_once_each_way():
    assert theory.all_reduce_double_tree(8, 1000) == Cost(6, 2000)
    assert theory.all_reduce_double_tree(5, S) == Cost(6, 2 * S)
    # Of two ranks, each is the root of one tree: half goes up, the other half down.
    assert theory.all_reduce_double_tree(2, 1000) == Cost(2, 1000)


def test_sharding_sends_the_same_between_nodes_through_g_ranks():
    leader = theory.all_reduce_hierarchical(4, 8, S, "leader")
    sharded = theory.all_reduce_hierarchical(4, 8, S, "sharded")
    assert leader.between.nbytes == 8 * sharded.between.nbytes
    assert leader.between.messages == sharded.between.messages


@pytest.mark.parametrize("name", EVERY_COST)
def test_one_rank_alone_costs_nothing(name):
    assert getattr(theory, name)(1, 2**20) == Cost(0, 0)


def test_one_rank_alone_costs_nothing_else_either():
    for variant in ("leader", "sharded"):
        cost = theory.all_reduce_hierarchical(1, 1, 2**20, variant)
        assert cost == HierarchicalCost(Cost(0, 0), Cost(0, 0))


@given(n=st.integers(1, 1000), k=st.integers(0, 2**20))
def test_divisible_sizes_give_whole_bytes(n, k):
    ring = theory.all_reduce_ring(n, n * k)
    assert ring.nbytes == 2 * (n - 1) * k


@given(
    n=st.integers(1, 64),
    nbytes=st.integers(0, 2**30),
    alpha=st.floats(0, 1e-2),
    bandwidth=st.floats(1e6, 1e12),
)
@pytest.mark.parametrize("name", EVERY_COST)
def test_more_bytes_never_take_less_time(name, n, nbytes, alpha, bandwidth):
    cost, link = getattr(theory, name), Link(alpha, bandwidth)
    assert cost(n, nbytes).over(link) <= cost(n, 2 * nbytes + 1).over(link)


def test_a_cost_over_a_link_is_what_the_link_says():
    link = Link(latency=0.25, bandwidth=8)
    assert Cost(1, 16).over(link) == link.seconds(16) == 2.25
    assert Cost(1, 16).over(Link()) == 0
    assert Cost(1, 2).seconds(100, 10) == 120


@pytest.mark.parametrize("name", EVERY_COST)
@pytest.mark.parametrize(
    ("n", "nbytes", "said"),
    [
        (0, 8, "world_size is 0"),
        (-3, 8, "world_size is -3"),
        (2.5, 8, "world_size is 2.5"),
        (4, -1, "nbytes is -1"),
        (4, math.nan, "nbytes is nan"),
        (4, "8", "nbytes is '8'"),
    ],
)
def test_bad_arguments_are_named(name, n, nbytes, said):
    with pytest.raises(ValueError, match=f"{said}; it must be"):
        getattr(theory, name)(n, nbytes)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Cost(1, 1).seconds(-1, 0), "alpha is -1; it must be"),
        (lambda: Cost(1, 1).seconds(0, math.inf), "beta is inf; it must be"),
        (lambda: theory.all_reduce_hierarchical(0, 2, 8), "nnodes is 0"),
        (lambda: theory.all_reduce_hierarchical(2, 0, 8), "nproc_per_node is 0"),
        (lambda: theory.all_reduce_hierarchical(2, 2, -8), "nbytes is -8"),
        (
            lambda: theory.all_reduce_hierarchical(2, 2, 8, "star"),
            "variant is 'star'; it can be 'leader' or 'sharded'",
        ),
    ],
)
def test_other_bad_arguments_are_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
