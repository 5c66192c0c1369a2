"""Attention over a divided sequence: the bytes that ranks send, and their work.

N ranks share B sequences of T tokens; each has T/N tokens of every sequence. With H
heads of queries, K heads of keys and of values, D channels a head and s bytes a number,
one rank's keys and values have u = 2 B (T/N) K D s bytes. In one layer each rank sends

                forward                             backward
    gathered    (N - 1) u                           (N - 1) u
    ring        (N - 1) u                           (N - 1) (u + w)
    ulysses     (N - 1)/N B (T/N) 2 (H + K) D s     the same

w is the size of the gradients of keys and values, which are sent in float32 at least:
w = u, or 2 u for 16-bit numbers. In forward, the ring sends N K / (H + K) times as much
as Ulysses; with K = H that is N / 2.

In causal attention position i sees i + 1 keys, so all positions together have
T (T + 1) / 2 pairs (query, key). With c = T / N, rank r computes

    contiguous  c^2 r + c (c + 1) / 2               last rank: about 2 - 1/N of the mean
    zigzag      T (T + 1) / (2 N)                   all ranks equal
    striped     c (r + 1) + N c (c - 1) / 2         nearly equal

Sources: Liu et al. 2023, arXiv:2310.01889; Jacobs et al. 2023, arXiv:2309.14509;
Dubey et al. 2024 (Llama 3), section 3.3.2; Brandon et al. 2023, arXiv:2311.09431.
Chapter 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ddp_course.spec import ATTENTION
from ddp_course.theory.checks import check_choice

FLOAT32 = 4  # bytes of a number


@dataclass(frozen=True)
class AttentionVolume:
    """The bytes that each rank sends for one layer's attention, both ways."""

    forward: Fraction
    backward: Fraction

    @property
    def total(self) -> Fraction:
        """All bytes together."""
        return self.forward + self.backward


def attention_volume(
    attention: str,
    ranks: int,
    *,
    batch: int,
    length: int,
    heads: int,
    d_head: int,
    kv_heads: int | None = None,
    itemsize: int = 4,
) -> AttentionVolume:
    """Return the bytes that each rank sends for one layer's attention.

    Args:
        attention: one of `spec.ATTENTION`.
        ranks: N, the ranks that share each sequence.
        batch: B, sequences.
        length: T, tokens of a sequence; a multiple of N.
        heads: H, heads of queries.
        d_head: D, channels of a head.
        kv_heads: K, heads of keys and values; None: as many as of queries.
        itemsize: s, bytes of a number.

    Chapter 16.
    """
    check_choice("attention", attention, ATTENTION)
    kv_heads = heads if kv_heads is None else kv_heads
    row = Fraction(batch * length * d_head, ranks)  # numbers of one head on one rank
    u = 2 * row * kv_heads * itemsize
    others = ranks - 1
    if attention == "ulysses":
        sent = Fraction(others, ranks) * 2 * (heads + kv_heads) * row * itemsize
        return AttentionVolume(sent, sent)
    if attention == "gathered":
        return AttentionVolume(others * u, others * u)
    gradients = u * max(itemsize, FLOAT32) / itemsize
    return AttentionVolume(others * u, others * (u + gradients))


def causal_pairs(assignment: str, length: int, ranks: int) -> list[Fraction]:
    """Return the number of pairs (query, key) that each rank computes.

    `assignment` is "contiguous", "zigzag" or "striped"; `length` is a multiple of
    `ranks`; for zigzag, of 2 `ranks`. Chapter 16.
    """
    c = Fraction(length, ranks)
    formulas = {
        "contiguous": lambda r: c * c * r + c * (c + 1) / 2,
        "zigzag": lambda r: c * (length + 1) / 2,
        "striped": lambda r: c * (r + 1) + ranks * c * (c - 1) / 2,
    }
    check_choice("assignment", assignment, formulas)
    return [formulas[assignment](r) for r in range(ranks)]


def unfairness(assignment: str, length: int, ranks: int) -> Fraction:
    """Return the work of the busiest rank, divided by the mean. Chapter 16."""
    pairs = causal_pairs(assignment, length, ranks)
    return max(pairs) * ranks / sum(pairs)
