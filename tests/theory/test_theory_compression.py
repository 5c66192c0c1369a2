"""Bytes of compressed gradients by closed form: known cases; where it stops paying.

That they are what ranks send is tests/compression's to show.
"""

from __future__ import annotations

import pytest

from ddp_course.theory import compressed_bytes
from ddp_course.theory.compression import factor_sizes, ring_bytes

MATRIX = [(1024, 1024)]


def test_one_rank_sends_nothing_and_uneven_chunks_add_up():
    assert compressed_bytes("none", MATRIX, 4) == 2 * 3 / 4 * 4 * 2**20
    for method in ("none", "fp16", "int8", "sign", "topk:0.1", "powersgd:2"):
        assert compressed_bytes(method, [(7, 5), (3,)], 1) == 0
    for n in (2, 3, 5):
        assert sum(ring_bytes(7, 4, n, r) for r in range(n)) == 2 * (n - 1) * 7 * 4


def test_what_is_too_small_goes_as_it_is():
    assert factor_sizes((1024, 1024), 4) == (4096, 4096)
    assert factor_sizes((64, 4, 4), 2) == (128, 32)
    for shape, rank in (((8, 8), 2), ((1024,), 1), ((), 1)):
        assert factor_sizes(shape, rank) == (0, 0)
    both = compressed_bytes("powersgd:2", [(8, 8), (1024,)], 2)
    assert both == compressed_bytes("none", [(8, 8), (1024,)], 2)


@pytest.mark.parametrize(("density", "ranks"), [(0.01, 99), (0.3, 3), (0.5, 0)])
def test_top_k_pays_while_its_density_is_below_1_over_n(density, ranks):
    numel = [(2**20,)]
    for n in range(2, 120):
        dense = compressed_bytes("none", numel, n)
        pays = compressed_bytes(f"topk:{density}", numel, n) < dense
        assert pays == (n <= ranks), n


def test_wrong_words():
    with pytest.raises(ValueError, match="method is 'zip'; it can be 'none', 'fp16'"):
        compressed_bytes("zip", MATRIX, 2)
    with pytest.raises(ValueError, match="after topk: is None; it must be a finite"):
        compressed_bytes("topk", MATRIX, 2)
