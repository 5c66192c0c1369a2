"""Lower bounds, bus bandwidth, and the size from which on a ring is better."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ddp_course import theory
from ddp_course.theory import Cost

S = Fraction(1)
ALGORITHMS = {
    "broadcast": ["broadcast_naive", "broadcast_tree"],
    "reduce": ["reduce_naive", "reduce_tree"],
    "scatter": ["scatter"],
    "gather": ["gather"],
    "all_gather": ["all_gather"],
    "reduce_scatter": ["reduce_scatter"],
    "all_to_all": ["all_to_all"],
    "all_reduce": [
        "all_reduce_naive",
        "all_reduce_tree",
        "all_reduce_double_tree",
        "all_reduce_halving_doubling",
        "all_reduce_ring",
    ],
}
EVERY = [(c, a) for c, algorithms in ALGORITHMS.items() for a in algorithms]
RIVALS = ["naive", "tree", "double_tree", "halving_doubling"]


def check_bound(collective, cost, n):
    """A cost obeys both bounds."""
    assert cost.messages >= (n - 1).bit_length()  # who know at most double
    assert cost.nbytes >= theory.least_bytes(collective, n, S)


@given(n=st.integers(1, 500))
@pytest.mark.parametrize(("collective", "algorithm"), EVERY)
def test_no_algorithm_beats_the_bounds(collective, algorithm, n):
    check_bound(collective, getattr(theory, algorithm)(n, S), n)


@pytest.mark.parametrize(
    "planted",
    [
        Cost(6, Fraction(1, 2)),  # as if a "ring" sent half of the tensor
        Cost(2, Fraction(2)),  # as if three ranks could know in two steps what 6 know
    ],
)
def test_too_good_costs_are_caught(planted):
    with pytest.raises(AssertionError):
        check_bound("all_reduce", planted, 6)


@given(n=st.integers(1, 500))
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce_ring"])
def test_rings_meet_the_bound_on_bytes(name, n):
    collective = name.removesuffix("_ring")
    least = theory.least_bytes(collective, n, S)
    assert getattr(theory, name)(n, S).nbytes == least


@given(n=st.integers(1, 500))
@pytest.mark.parametrize("name", ["broadcast_tree", "reduce_tree"])
def test_trees_meet_the_bound_on_messages(name, n):
    assert getattr(theory, name)(n, S).messages == (n - 1).bit_length()


def test_least_bytes_in_numbers():
    assert theory.least_bytes("all_reduce", 4, 1000) == 1500
    assert theory.least_bytes("all_gather", 4, 1000) == 750
    assert theory.least_bytes("broadcast", 4, 1000) == 1000
    assert theory.least_bytes("broadcast", 1, 1000) == 0


def test_bus_factors_are_those_of_nccl_tests():
    factors = {c: theory.bus_factor(c, 4) for c in ALGORITHMS}
    three_quarters = Fraction(3, 4)
    assert factors == {
        "all_reduce": Fraction(3, 2),
        "all_gather": three_quarters,
        "reduce_scatter": three_quarters,
        "all_to_all": three_quarters,
        "scatter": three_quarters,
        "gather": three_quarters,
        "broadcast": 1,
        "reduce": 1,
    }


def check_crossover(crossover, n, alpha, beta, other):
    """Just below it the other is faster, just above it the ring is (or as fast)."""

    def ahead(size):  # how much faster the ring is, relatively
        ring = theory.all_reduce_ring(n, size).seconds(alpha, beta)
        return 1 - ring / other(n, size).seconds(alpha, beta)

    tiny = 1e-12
    if crossover == math.inf:
        assert ahead(1e15) < 0
    else:
        assert ahead(crossover * 1.01 + 1) >= -tiny
        assert crossover == 0 or ahead(crossover * 0.99) < 0
        assert crossover == 0 or abs(ahead(crossover)) < tiny


@given(n=st.integers(2, 200), alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-11, 1e-7))
@pytest.mark.parametrize("rival", RIVALS)
def test_from_the_crossover_on_the_ring_is_not_slower(rival, n, alpha, beta):
    other = getattr(theory, f"all_reduce_{rival}")
    check_crossover(theory.crossover(n, alpha, beta, other), n, alpha, beta, other)


@given(k=st.integers(0, 12), alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-11, 1e-7))
def test_the_formulas_of_the_docstring(k, alpha, beta):
    n = 2**k
    close = pytest.approx
    assert theory.crossover(n, alpha, beta) == close(n * alpha / beta * (n - 1 - k))
    tree = theory.crossover(n, alpha, beta, theory.all_reduce_tree)
    assume(n > 1)
    assert tree == close((n - 1 - k) / (k - (n - 1) / n) * alpha / beta)
    assert theory.crossover(n, alpha, beta, theory.all_reduce_naive) == 0
    halving = theory.all_reduce_halving_doubling
    assert theory.crossover(n, alpha, beta, halving) == (math.inf if k > 1 else 0)


@pytest.mark.parametrize(
    "planted",
    [
        lambda n, alpha, beta: alpha / beta * (n - 1 - math.log2(n)),  # no n
        lambda n, alpha, beta: n * alpha / beta * (n - math.log2(n)),  # n steps
        lambda n, alpha, beta: n * beta / alpha * (n - 1 - math.log2(n)),  # inverse
        lambda n, alpha, beta: math.inf,
        lambda n, alpha, beta: 0,
    ],
)
def test_wrong_crossovers_are_caught(planted):
    other = theory.all_reduce_double_tree
    with pytest.raises(AssertionError):
        check_crossover(planted(8, 1e-4, 1e-9), 8, 1e-4, 1e-9, other)


def test_free_messages_or_free_bytes():
    assert theory.crossover(8, 0, 1e-9) == 0
    assert theory.crossover(8, 1e-4, 0) == math.inf


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: theory.bus_factor("ring", 2), "collective is 'ring'; it can be one"),
        (lambda: theory.bus_factor("reduce", 0), "world_size is 0; it must be"),
        (lambda: theory.least_bytes("x", 2, 8), "collective is 'x'; it can be one"),
        (lambda: theory.least_bytes("reduce", 2, -8), "nbytes is -8; it must be"),
        (lambda: theory.crossover(0, 1, 1), "world_size is 0; it must be"),
        (lambda: theory.crossover(2, -1, 1), "alpha is -1; it must be"),
        (lambda: theory.crossover(2, 1, -1), "beta is -1; it must be"),
    ],
)
def test_bad_arguments_to_bounds_are_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
