"""Divided attention: the ratios and limits that papers name.

That bytes and pairs are those of ranks is tested in tests/context_parallel.
"""

from fractions import Fraction

import pytest
from refusals import refused

from ddp_course.theory import attention_volume, causal_pairs, unfairness


@pytest.mark.parametrize(("kv_heads", "n"), [(32, 2), (32, 8), (8, 2), (8, 4), (8, 8)])
def test_ring_over_ulysses_is_n_k_over_h_plus_k(kv_heads, n):
    sizes = {"batch": 1, "length": 64, "heads": 32, "d_head": 2, "kv_heads": kv_heads}
    ring, ulysses = (attention_volume(a, n, **sizes) for a in ("ring", "ulysses"))
    ratio = ring.forward / ulysses.forward
    assert ratio == Fraction(n * kv_heads, 32 + kv_heads)


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
