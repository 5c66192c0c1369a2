"""Costs, bytes and bounds of collectives, against a cluster played by messages."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import theory_simulator as simulator
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from theory_simulator import BYTES, FREE, MESSAGES, play

from ddp_course import theory
from ddp_course.launch import Link, Links
from ddp_course.theory import ALGORITHMS, Cost
from ddp_course.theory.collectives import TwoLevels, children

S = Fraction(1)
SIMULATED = [
    name for name, row in ALGORITHMS.items() if row.sent
]  # not the double tree
SIZES = [*range(1, 10), 16, 17]
SHAPES = [(1, 1), (1, 5), (4, 1), (2, 2), (2, 4), (3, 3), (3, 4), (4, 3)]
VARIANTS = ["leader", "sharded"]


# ---- what the clocks and the meters show ---------------------------------------------


def check_cost(cost, program):
    """`cost` is what the clocks of `program` show, price by price and all together."""
    mixed = (Fraction(3), Fraction(5))
    assert cost.messages == play(program, MESSAGES)[0]
    assert cost.nbytes == play(program, BYTES)[0]
    by_hand = cost.messages * mixed[0] + cost.nbytes * mixed[1]
    assert by_hand == play(program, mixed)[0]


def check_volume(sent, program):
    """`sent` is what each rank of `program` sends."""
    assert sent == play(program, FREE)[1]


@pytest.mark.parametrize("name", SIMULATED)
def test_costs_and_bytes_are_what_one_sees(name):
    for n in SIZES:
        check_cost(getattr(theory, name)(n, S), getattr(simulator, name)(n))
        check_volume(theory.bytes_sent(name, n), getattr(simulator, name)(n))


def planted_fold(n):
    p = 2 ** math.floor(math.log2(n))  # the other ranks are forgotten
    return theory.all_reduce_halving_doubling(p, S)


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("all_reduce_ring", Cost(12, 2 * S)),  # n steps where n-1 do
        ("all_reduce_tree", Cost(4, 4 * S)),  # log2 rounded down
        ("all_reduce_naive", Cost(12, 12 * S)),  # the root sends to itself
        ("all_reduce_halving_doubling", planted_fold(6)),
        ("all_gather", Cost(5, S)),  # the root's own part is sent, too
        ("all_reduce_ring", [2] * 6),  # n steps, not n-1
        ("all_reduce_ring", [Fraction(5, 6)] * 6),  # half of it only
        ("all_reduce_ring", [10] * 6),  # the whole tensor in each step
        ("all_reduce_halving_doubling", [Fraction(5, 3)] * 6),  # as in a ring
        ("all_reduce_naive", [10, 0, 0, 0, 0, 0]),  # the root does it all
    ],
)
def test_wrong_costs_and_volumes_are_caught(name, planted):
    check = check_cost if isinstance(planted, Cost) else check_volume
    with pytest.raises(AssertionError):
        check(planted, getattr(simulator, name)(6))


def rotated_back(n, root):
    """The tree of `root`, rotated the wrong way."""
    sent = theory.bytes_sent("broadcast_tree", n)
    return [sent[(rank + root) % n] for rank in range(n)]


def numbered_as_gloo(n, root):
    """A rank sends to rank + 2^k for the 2^k above its own highest bit."""
    below = [sum(r < 2**k and r + 2**k < n for k in range(9)) for r in range(n)]
    return [Fraction(below[(rank - root) % n]) for rank in range(n)]


def unrotated(n, root):
    return theory.bytes_sent("broadcast_tree", n)


@pytest.mark.parametrize("planted", [rotated_back, numbered_as_gloo, unrotated])
def test_wrong_trees_are_caught(planted):
    with pytest.raises(AssertionError):
        check_volume(planted(6, 1), simulator.broadcast_tree(6, 1))


@given(n=st.integers(1, 200))
def test_the_tree_has_every_rank_once_and_doubles(n):
    parents = {c: r for r in range(n) for c in children(r, n)}
    assert sorted(parents) == list(range(1, n))
    reached, steps = {0}, 0
    waiting = {r: children(r, n) for r in range(n)}
    while len(reached) < n:
        reached |= {waiting[r].pop(0) for r in list(reached) if waiting[r]}
        steps += 1
    assert steps == theory.broadcast_tree(n, 1).messages


def test_a_double_tree_sends_all_of_it_once_each_way():
    assert theory.all_reduce_double_tree(8, 1000) == Cost(6, 2000)
    assert theory.all_reduce_double_tree(5, S) == Cost(6, 2 * S)
    # Of two ranks, each is the root of one tree: half goes up, the other half down.
    assert theory.all_reduce_double_tree(2, 1000) == Cost(2, 1000)
    assert theory.all_reduce_double_tree(1, 1000) == Cost(0, 0)


# ---- two levels, and links -----------------------------------------------------------


def check_hierarchical(cost, sent, program):
    """The cost inside and between, and what each rank sends inside and between."""
    for one, prices in ((cost.inside, (1, 0)), (cost.between, (0, 1))):
        for price, value in ((MESSAGES, one.messages), (BYTES, one.nbytes)):
            inside, between = (price if on else FREE for on in prices)
            assert value == play(program, inside, between)[0]
    seen = zip(*play(program, FREE)[1:], strict=True)
    assert sent == [TwoLevels(*both) for both in seen]


def hierarchical(shape, variant):
    return (
        theory.all_reduce_hierarchical(*shape, S, variant),
        theory.hierarchical_bytes_sent(*shape, variant),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_hierarchies_cost_and_send_what_one_sees(variant, shape):
    program = getattr(simulator, f"hierarchical_{variant}")(*shape)
    check_hierarchical(*hierarchical(shape, variant), program)


@pytest.mark.parametrize("variant", VARIANTS)
def test_wrong_hierarchies_are_caught(variant):
    other = {"leader": "sharded", "sharded": "leader"}[variant]
    program = getattr(simulator, f"hierarchical_{variant}")(3, 4)
    cost, sent = hierarchical((3, 4), variant)
    costs, bytes_ = zip(
        hierarchical((3, 4), other),
        hierarchical((4, 3), variant),  # nodes and ranks swapped
        (
            TwoLevels(cost.inside, theory.all_reduce_ring(12, S)),
            [TwoLevels(r.inside, 4 * r.between) for r in sent],  # S, not S/g
        ),
        strict=True,
    )
    for wrong in [*((c, sent) for c in costs), *((cost, b) for b in bytes_)]:
        with pytest.raises(AssertionError):
            check_hierarchical(*wrong, program)


def test_each_link_counts_for_its_part():
    links = Links(inside=Link(0, 8), between=Link(5, 2))
    cost = TwoLevels(Cost(100, 16), Cost(2, 10))
    assert cost.seconds(links) == 16 / 8 + 2 * 5 + 10 / 2
    link = Link(latency=0.25, bandwidth=8)
    assert Cost(1, 16).over(link) == link.seconds(16) == 2.25
    assert Cost(1, 16).over(Link()) == 0
    assert Cost(1, 2).seconds(100, 10) == 120


# ---- bounds, and the size from which on a ring is better -----------------------------


def check_bound(name, cost, n):
    """A cost obeys both bounds; rings meet that on bytes, trees that on messages."""
    collective = next(known for known in FACTORS if name.startswith(known))
    messages, nbytes = (n - 1).bit_length(), theory.least_bytes(collective, n, S)
    assert cost.messages >= messages  # who know at most double
    assert cost.nbytes >= nbytes
    if name in ("all_gather", "reduce_scatter", "all_reduce_ring"):
        assert cost.nbytes == nbytes
    if name in ("broadcast_tree", "reduce_tree"):
        assert cost.messages == messages


PARTS = ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")
FACTORS = {  # of nccl-tests, for four ranks
    "all_reduce": Fraction(3, 2),
    **dict.fromkeys(PARTS, Fraction(3, 4)),
    **dict.fromkeys(("broadcast", "reduce"), 1),
}


@given(n=st.integers(1, 500))
@pytest.mark.parametrize("name", ALGORITHMS)
def test_no_algorithm_beats_the_bounds(name, n):
    check_bound(name, getattr(theory, name)(n, S), n)


@pytest.mark.parametrize(
    "planted",
    [
        Cost(6, Fraction(1, 2)),  # as if a "ring" sent half of the tensor
        Cost(2, Fraction(2)),  # as if three ranks could know in two steps what 6 know
    ],
)
def test_too_good_costs_are_caught(planted):
    with pytest.raises(AssertionError):
        check_bound("all_reduce_naive", planted, 6)


def test_bus_factors_and_least_bytes_in_numbers():
    assert {name: theory.bus_factor(name, 4) for name in FACTORS} == FACTORS
    for name, factor in FACTORS.items():
        assert theory.least_bytes(name, 4, 1000) == factor * 1000
        assert theory.least_bytes(name, 1, 1000) == 0


def check_crossover(crossover, n, alpha, beta):
    """Just below it a double tree is faster, just above it the ring is (or as fast)."""

    def ahead(size):  # how much faster the ring is, relatively
        ring = theory.all_reduce_ring(n, size).seconds(alpha, beta)
        tree = theory.all_reduce_double_tree(n, size).seconds(alpha, beta)
        return 1 - ring / tree

    tiny = 1e-12
    if crossover == math.inf:
        assert ahead(1e15) < 0
    else:
        assert ahead(crossover * 1.01 + 1) >= -tiny
        assert crossover == 0 or ahead(crossover * 0.99) < 0
        assert crossover == 0 or abs(ahead(crossover)) < tiny


@given(n=st.integers(2, 200), alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-11, 1e-7))
def test_from_the_crossover_on_the_ring_is_not_slower(n, alpha, beta):
    check_crossover(theory.crossover(n, alpha, beta), n, alpha, beta)


@given(k=st.integers(0, 12), alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e-11, 1e-7))
def test_the_formula_of_the_docstring(k, alpha, beta):
    n, close = 2**k, pytest.approx
    assert theory.crossover(n, alpha, beta) == close(n * alpha / beta * (n - 1 - k))
    assert theory.crossover(8, 0, beta) == 0
    assert theory.crossover(8, alpha, 0) == math.inf


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
    with pytest.raises(AssertionError):
        check_crossover(planted(8, 1e-4, 1e-9), 8, 1e-4, 1e-9)


# ---- bad input -----------------------------------------------------------------------


test_bad_arguments_are_named = refused(
    (lambda: theory.all_reduce_hierarchical(2, 2, 8, "star"), "'star'; it can be 'lea"),
    (lambda: theory.bytes_sent("ring", 4), "algorithm is 'ring'; it can be 'broad"),
    (lambda: children(4, 4), "rank is 4; it can be 0 to 3"),
    (lambda: theory.hierarchical_bytes_sent(2, 2, "x"), "variant is 'x'; it can"),
    (lambda: theory.bus_factor("ring", 2), "collective is 'ring'; it can be 'all"),
    (lambda: theory.least_bytes("x", 2, 8), "collective is 'x'; it can be 'all"),
)
