"""How many bytes each rank sends, against a cluster played message by message."""

from __future__ import annotations

from fractions import Fraction

import pytest
import theory_simulator as simulator
from hypothesis import given
from hypothesis import strategies as st
from theory_simulator import FREE, play

from ddp_course import theory
from ddp_course.theory import ALGORITHMS, HierarchicalBytes

SENT = {name: row for name, row in ALGORITHMS.items() if row.sent}
WITH_ROOT = [name for name, row in SENT.items() if row.root]
WITHOUT_ROOT = [name for name, row in SENT.items() if not row.root]
ALL_REDUCES = [a for a in (*WITH_ROOT, *WITHOUT_ROOT) if a.startswith("all_reduce")]
SIZES = [*range(1, 10), 16, 17]
SHAPES = [(1, 1), (1, 5), (4, 1), (2, 2), (2, 4), (3, 3), (3, 4), (4, 3)]
# What must arrive in all, in multiples of S, counted from what each rank must have.
MUST_ARRIVE = {
    "broadcast": lambda n: n - 1,  # everyone but the root lacks S
    "reduce": lambda n: n - 1,
    "scatter": lambda n: Fraction(n - 1, n),  # everyone but the root lacks S/n
    "gather": lambda n: Fraction(n - 1, n),
    "all_gather": lambda n: n - 1,  # everyone lacks n-1 parts of S/n
    "reduce_scatter": lambda n: n - 1,
    "all_to_all": lambda n: n - 1,
    "all_reduce": lambda n: 2 * (n - 1),
}


def check_volume(sent, program):
    """`sent` is what each rank of `program` sends."""
    assert sent == play(program, FREE)[1]


def check_total(algorithm, sent):
    """All that is sent is all that must arrive."""
    collective = next(c for c in MUST_ARRIVE if algorithm.startswith(c))
    assert sum(sent) == MUST_ARRIVE[collective](len(sent))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("algorithm", WITH_ROOT)
def test_with_a_root_each_rank_sends_what_it_is_seen_to_send(algorithm, n):
    for root in range(n):
        program = getattr(simulator, algorithm)(n, root)
        check_volume(theory.bytes_sent(algorithm, n, root), program)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("algorithm", WITHOUT_ROOT)
def test_without_a_root_each_rank_sends_what_it_is_seen_to_send(algorithm, n):
    program = getattr(simulator, algorithm)(n)
    check_volume(theory.bytes_sent(algorithm, n), program)


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
    program = simulator.broadcast_tree(6, 1)
    check_volume(theory.bytes_sent("broadcast_tree", 6, 1), program)
    with pytest.raises(AssertionError):
        check_volume(planted(6, 1), program)


@pytest.mark.parametrize(
    ("algorithm", "planted"),
    [
        ("all_reduce_ring", [Fraction(2)] * 6),  # n steps, not n-1
        ("all_reduce_ring", [Fraction(5, 6)] * 6),  # half of it only
        ("all_reduce_ring", [Fraction(10)] * 6),  # the whole tensor in each step
        ("all_reduce_halving_doubling", [Fraction(5, 3)] * 6),  # as in a ring
        ("all_reduce_naive", [Fraction(10)] + [Fraction(0)] * 5),  # root does it all
    ],
)
def test_wrong_volumes_are_caught(algorithm, planted):
    with pytest.raises(AssertionError):
        check_volume(planted, getattr(simulator, algorithm)(6))


@given(n=st.integers(1, 200), root=st.integers(0, 199))
@pytest.mark.parametrize("algorithm", [*WITH_ROOT, *WITHOUT_ROOT])
def test_all_that_is_sent_is_all_that_must_arrive(algorithm, n, root):
    root = root % n if algorithm in WITH_ROOT else 0
    check_total(algorithm, theory.bytes_sent(algorithm, n, root))


def test_bytes_sent_in_vain_are_caught():
    with pytest.raises(AssertionError):
        check_total("all_reduce_ring", [Fraction(2)] * 4)


@given(n=st.integers(1, 300))
@pytest.mark.parametrize("algorithm", ["all_gather", "reduce_scatter", "all_to_all"])
def test_where_all_send_alike_the_busiest_rank_is_the_critical_path(algorithm, n):
    sent = theory.bytes_sent(algorithm, n)
    assert set(sent) == {getattr(theory, algorithm)(n, Fraction(1)).nbytes}


@given(n=st.integers(1, 300), root=st.integers(0, 299))
@pytest.mark.parametrize(
    "algorithm", ["broadcast_naive", "broadcast_tree", "scatter", "all_reduce_ring"]
)
def test_costs_and_volume_agree_on_the_busiest_rank(algorithm, n, root):
    root = root % n if algorithm in WITH_ROOT else 0
    sent = theory.bytes_sent(algorithm, n, root)
    assert sent[root] == max(sent) == getattr(theory, algorithm)(n, Fraction(1)).nbytes


@given(n=st.integers(1, 300))
@pytest.mark.parametrize("algorithm", ["gather", "reduce_naive"])
def test_costs_and_volume_agree_on_what_the_root_receives(algorithm, n):
    total = sum(theory.bytes_sent(algorithm, n))
    assert total == getattr(theory, algorithm)(n, Fraction(1)).nbytes


@given(k=st.integers(0, 10))
def test_for_powers_of_two_halving_doubling_sends_what_a_ring_sends(k):
    ring = theory.bytes_sent("all_reduce_ring", 2**k)
    assert theory.bytes_sent("all_reduce_halving_doubling", 2**k) == ring


@given(n=st.integers(1, 300))
@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_no_all_reduce_sends_less_than_the_bound(algorithm, n):
    least = theory.least_bytes("all_reduce", n, Fraction(1))
    assert max(theory.bytes_sent(algorithm, n)) >= least
    if algorithm == "all_reduce_ring":
        assert max(theory.bytes_sent(algorithm, n)) == least


def test_the_numbers_of_the_lesson():
    two, one, none = Fraction(2), Fraction(1), Fraction(0)
    assert theory.bytes_sent("broadcast_tree", 4) == [two, none, one, none]
    assert theory.bytes_sent("all_reduce_naive", 4) == [3, 1, 1, 1]
    assert theory.bytes_sent("all_reduce_tree", 4) == [2, 1, 2, 1]
    assert theory.bytes_sent("all_reduce_ring", 4) == [Fraction(3, 2)] * 4
    folded = theory.bytes_sent("all_reduce_halving_doubling", 3)
    assert folded == [two, one, one]


@given(n=st.integers(1, 200))
def test_the_tree_has_every_rank_once_and_doubles(n):
    parents = {c: r for r in range(n) for c in theory.children(r, n)}
    assert sorted(parents) == list(range(1, n))
    reached, steps = {0}, 0
    waiting = {r: theory.children(r, n) for r in range(n)}
    while len(reached) < n:
        reached |= {waiting[r].pop(0) for r in list(reached) if waiting[r]}
        steps += 1
    assert steps == theory.broadcast_tree(n, 1).messages


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("variant", ["leader", "sharded"])
def test_hierarchies_send_what_they_are_seen_to_send(variant, shape):
    sent = theory.hierarchical_bytes_sent(*shape, variant)
    check_hierarchical_volume(sent, variant, shape)
    between = sum(s.between for s in sent)
    assert between == 2 * (shape[0] - 1)
    assert between + sum(s.inside for s in sent) == 2 * (len(sent) - 1)


def check_hierarchical_volume(sent, variant, shape):
    _, inside, between = play(
        getattr(simulator, f"hierarchical_{variant}")(*shape), FREE
    )
    seen = [HierarchicalBytes(*both) for both in zip(inside, between, strict=True)]
    assert sent == seen


@pytest.mark.parametrize("variant", ["leader", "sharded"])
def test_wrong_hierarchies_are_caught(variant):
    other = {"leader": "sharded", "sharded": "leader"}[variant]
    right = theory.hierarchical_bytes_sent(3, 4, variant)
    for planted in (
        theory.hierarchical_bytes_sent(3, 4, other),
        theory.hierarchical_bytes_sent(4, 3, variant),
        [
            HierarchicalBytes(r.inside, 4 * r.between) for r in right
        ],  # all of S, not S/g
    ):
        with pytest.raises(AssertionError):
            check_hierarchical_volume(planted, variant, (3, 4))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("variant", ["staged", "registered"])
def test_shared_memory_moves_what_it_is_seen_to_move(variant, n):
    # Rank r adds part r of everyone's tensor, then every rank gets every part.
    read, written = [Fraction(0)] * n, [Fraction(0)] * n
    for r in range(n):
        for peer in set(range(n)) - {r}:
            read[r] += Fraction(1, n)  # the peer's numbers of part r
            if variant == "staged":
                read[peer] += Fraction(1, n)  # the sum of part r
            else:
                written[r] += Fraction(1, n)  # the sum of part r, to the peer
    moved = theory.shared_memory_bytes(n, variant)
    assert [m.read for m in moved] == read
    assert [m.written for m in moved] == written
    assert [m.sent for m in moved] == [0] * n


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: theory.bytes_sent("ring", 4), "algorithm is 'ring'; it can be one of"),
        (lambda: theory.bytes_sent("scatter", 0), "world_size is 0; it must be"),
        (lambda: theory.bytes_sent("scatter", 4, 4), "root is 4; .* from 0 to 3"),
        (lambda: theory.bytes_sent("scatter", 4, -1), "root is -1; .* from 0 to 3"),
        (lambda: theory.bytes_sent("scatter", 4, 1.5), "root is 1.5; .* an integer"),
        (lambda: theory.bytes_sent("all_gather", 4, 1), "root is 1, but all_gather"),
        (lambda: theory.children(4, 4), "rank is 4; it can be 0 to 3"),
        (lambda: theory.hierarchical_bytes_sent(0, 4), "nnodes is 0; it must be"),
        (lambda: theory.hierarchical_bytes_sent(2, 0), "nproc_per_node is 0; it"),
        (lambda: theory.hierarchical_bytes_sent(2, 2, "x"), "variant is 'x'; it can"),
        (lambda: theory.shared_memory_bytes(2, "x"), "variant is 'x'; it can"),
        (lambda: theory.shared_memory_bytes(0), "world_size is 0; it must be"),
    ],
)
def test_bad_arguments_to_volumes_are_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
