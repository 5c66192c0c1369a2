"""Divided attention: the formulas beside a count of every message and every pair."""

from collections import Counter
from fractions import Fraction

import pytest
from refusals import refused

from ddp_course.theory import attention_volume, causal_pairs, unfairness

B, T, H, D = 2, 24, 12, 4
RANKS = (1, 2, 3, 4, 6)


def counted(attention, n, kv_heads, itemsize):
    """Go through one layer message by message; return (forward, backward) of rank 0."""
    wide, sent = max(itemsize, 4), Counter()
    part = B * (T // n) * D  # numbers of one head
    for _ in range(1, n):
        if attention == "ulysses":  # to every other rank: its heads of my part
            for way in ("forward", "backward"):
                sent[way] += part * (H // n) * itemsize * 2  # queries, outputs
                sent[way] += part * Fraction(kv_heads, n) * itemsize * 2
        elif attention == "gathered":  # around the ring of an all-gather, and back
            sent["forward"] += 2 * part * kv_heads * itemsize
            sent["backward"] += 2 * part * kv_heads * itemsize
        else:  # keys and values; in backward their gradients, too, one step behind
            sent["forward"] += 2 * part * kv_heads * itemsize
            sent["backward"] += 2 * part * kv_heads * (itemsize + wide)
    return sent["forward"], sent["backward"]


@pytest.mark.parametrize("attention", ["gathered", "ulysses", "ring"])
@pytest.mark.parametrize("n", RANKS)
def test_bytes_are_those_of_all_messages(attention, n):
    for kv_heads in (None, 6):
        for itemsize in (2, 4, 8):
            found = attention_volume(
                attention, n, batch=B, length=T, heads=H, d_head=D,
                kv_heads=kv_heads, itemsize=itemsize,
            )  # fmt: skip
            wanted = counted(attention, n, kv_heads or H, itemsize)
            assert (found.forward, found.backward) == wanted
            assert found.total == sum(wanted)


@pytest.mark.parametrize(("kv_heads", "n"), [(32, 2), (32, 8), (8, 2), (8, 4), (8, 8)])
def test_ring_over_ulysses_is_n_k_over_h_plus_k(kv_heads, n):
    sizes = {"batch": 1, "length": 64, "heads": 32, "d_head": 2, "kv_heads": kv_heads}
    ring, ulysses = (attention_volume(a, n, **sizes) for a in ("ring", "ulysses"))
    ratio = ring.forward / ulysses.forward
    assert ratio == Fraction(n * kv_heads, 32 + kv_heads)


POSITIONS = {
    "contiguous": lambda r, n: range(r * T // n, (r + 1) * T // n),
    "zigzag": lambda r, n: [
        i for i in range(T) if i * 2 * n // T in (r, 2 * n - 1 - r)
    ],
    "striped": lambda r, n: range(r, T, n),
}


@pytest.mark.parametrize("assignment", POSITIONS)
@pytest.mark.parametrize("n", RANKS)
def test_pairs_are_those_below_the_diagonal(assignment, n):
    counts = [sum(i + 1 for i in POSITIONS[assignment](r, n)) for r in range(n)]
    assert causal_pairs(assignment, T, n) == counts
    assert sum(counts) == T * (T + 1) // 2
    assert unfairness(assignment, T, n) == Fraction(max(counts) * n, sum(counts))


def test_the_busiest_rank():
    for n in (2, 4, 8):
        limit = 2 - Fraction(1, n)
        assert limit - unfairness("contiguous", 10**6 * n, n) < 1e-5
        assert unfairness("zigzag", 16 * n, n) == 1
        assert unfairness("striped", 16 * n, n) == 1 + Fraction(n - 1, 16 * n + 1)


test_what_cannot_be_asked_for = refused(
    (
        lambda: attention_volume("all", 2, batch=1, length=2, heads=1, d_head=1),
        "attention is 'all'; it can be 'ring', 'gathered', 'ulysses'",
    ),
    (
        lambda: causal_pairs("zag", 8, 2),
        "assignment is 'zag'; it can be 'contiguous', 'zigzag', 'striped'",
    ),
)
