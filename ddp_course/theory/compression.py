"""The bytes that ranks send with compressed gradients, and with local SGD.

For a bucket of d float32 numbers on N ranks:

                    bytes that a rank sends                    can an all-reduce add it?
    uncompressed    2 (N-1)/N of 4 d                           yes
    16 bits         2 (N-1)/N of 2 d                           yes
    8 bits          2 (N-1)/N of d + 4 d / block               no: scatter, add, gather
    sign            (N-1) times (d / 8 + 4)                    no: all-gather
    top-k           (N-1) times 8 k (indices, values)          no: all-gather
    random-k        2 (N-1)/N of 4 k                           yes: the same k for all
    PowerSGD        2 (N-1)/N of 4 r (n + m), for a matrix     yes: P, Q are linear

The bytes of an all-gather grow with N, those of an all-reduce hardly do. So top-k sends
less than the plain all-reduce only if 8 k (N-1) < 8 d (N-1) / N, that is k / d < 1 / N,
and sign (always 32 times smaller) only for at most some 64 ranks. Chapter 14.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import prod

from ddp_course.spec import COMPRESSORS
from ddp_course.theory.checks import (
    check_choice,
    check_positive,
)
from ddp_course.theory.collectives import bytes_sent

INT32 = FLOAT32 = 4  # bytes


def ring_bytes(numel: int, itemsize: int, world_size: int, rank: int) -> int:
    """Return the bytes that a rank sends in a ring all-reduce of any size.

    The rank sends all chunks but its own in the reduce-scatter, and all but the next
    rank's in the all-gather. The tensor has `numel` numbers of `itemsize` bytes.
    """
    bounds = [c * numel // world_size for c in range(world_size + 1)]
    own, next_one = (bounds[c + 1] - bounds[c] for c in (rank, (rank + 1) % world_size))
    return (2 * numel - own - next_one) * itemsize


def kept_count(density: float, numel: int) -> int:
    """Return k: the count of numbers that top-k and random-k send, at least one."""
    return max(1, round(density * numel))


def factor_sizes(shape: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the sizes of a gradient's factors P and Q; (0, 0) if it is sent whole.

    The first dimension is n, all others together are m. As in PyTorch, factors are sent
    if they are smaller than half of the matrix.
    """
    n, m = prod(shape[:1]), prod(shape[1:])
    r = min(n, m, rank)
    return (n * r, m * r) if 2 * r * (n + m) < n * m else (0, 0)


def _eight_bits(numel: int, n: int, block: int) -> int:
    blocks = -(-numel // (n * block))  # in each rank's part
    return 2 * (n - 1) * blocks * (block + FLOAT32)


def _power(shapes: Sequence[Sequence[int]], n: int, rank: int, r: int) -> int:
    pairs = [factor_sizes(shape, r) for shape in shapes]
    rest = sum(prod(s) for s, (p, _) in zip(shapes, pairs, strict=True) if not p)
    ps, qs = (sum(sizes) for sizes in zip(*pairs, strict=True))
    return ring_bytes(ps + rest, FLOAT32, n, rank) + ring_bytes(qs, FLOAT32, n, rank)


# {name: function (shapes, d, N, rank, number after the colon) -> bytes}
METHODS: dict[str, Callable[..., int]] = {
    "none": lambda shapes, d, n, rank, _: ring_bytes(d, FLOAT32, n, rank),
    "fp16": lambda shapes, d, n, rank, _: ring_bytes(d, 2, n, rank),
    "bf16": lambda shapes, d, n, rank, _: ring_bytes(d, 2, n, rank),
    "int8": lambda shapes, d, n, rank, block: _eight_bits(d, n, int(block or 64)),
    "sign": lambda shapes, d, n, rank, _: (n - 1) * (-(-d // 8) + FLOAT32),
    "topk": lambda shapes, d, n, rank, density: (
        (n - 1) * (INT32 + FLOAT32) * kept_count(density, d)
    ),
    "randomk": lambda shapes, d, n, rank, density: ring_bytes(
        kept_count(density, d), FLOAT32, n, rank
    ),
    "powersgd": lambda shapes, d, n, rank, r: _power(shapes, n, rank, int(r)),
}


def compressed_bytes(
    method: str, shapes: Sequence[Sequence[int]], world_size: int, rank: int = 0
) -> int:
    """Return how many bytes `rank` sends to average one bucket of float32 gradients.

    Args:
        method: as for `train --compress`: "fp16", "int8", "topk:0.01", "powersgd:4";
            "none" is the plain all-reduce.
        shapes: the shapes of the gradients in the bucket.
        world_size: N.
        rank: the sender; ranks differ if N does not divide the number of elements.

    For this course's collectives, in which all-reduces are rings. Raises ValueError for
    an unknown method, or for a method without its number. Chapter 14.
    """
    name, _, amount = method.partition(":")
    check_choice("method", name, METHODS)
    value = float(amount) if amount else None
    if COMPRESSORS.get(name):
        check_positive(f"the number after {name}:", value)
    numel = sum(prod(shape) for shape in shapes)
    return METHODS[name](shapes, numel, world_size, rank, value)


def local_sgd_bytes(
    world_size: int, nbytes: float, every: int, steps: int, warmup: int = 0
) -> Fraction:
    """Return the bytes that each rank sends in `steps` steps of local SGD, in rings.

    In the first `warmup` steps, gradients are averaged in every step. Then parameters,
    which are as large (`nbytes`), are averaged after every `every` steps: 1 / `every`
    of the bytes of data parallelism. Steps after the last average send nothing. Chapter
    14.
    """
    alone = max(0, steps - warmup)
    times = min(steps, warmup) + alone // every
    return times * bytes_sent("all_reduce_ring", world_size)[0] * Fraction(nbytes)
