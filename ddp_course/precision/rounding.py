"""The damage of rounding: updates that are lost, and sums that depend on the order.

A weight w and an update u are numbers of a format; w + u is rounded to that format. If
u is less than half of the distance to the next number, the sum is w: the update is
lost, and so is every later update of this size. There are three cures; the first two
keep the lost part:

    a master copy     add in more bits, and round a copy          4 bytes a parameter
    compensation      store the lost part, and add it to the      2 bytes a parameter
                      next update (Kahan)
    stochastic        round up or down at random, so that the     no memory, but noise
    rounding          mean is right

Higham 2002, "Accuracy and Stability of Numerical Algorithms", sections 4.2 and 4.3;
Gupta et al. 2015, "Deep Learning with Limited Numerical Precision". Chapter 12.
"""

import torch
from torch import Tensor

from ddp_course.theory.checks import check_choice

ORDERS = ("one by one", "tree", "ring")


def lost(weight: Tensor, update: Tensor) -> Tensor:
    """Return, for each element, whether adding a non-zero `update` changes nothing.

    Both have the same floating-point type and shape; the result is a bool tensor.
    """
    return (weight + update == weight) & (update != 0)


def kahan_add_(total: Tensor, compensation: Tensor, value: Tensor) -> Tensor:
    """Add `value` and `compensation` to `total`; keep the lost part in `compensation`.

    All have one shape and type. Changes the first two in place, and returns `total`.
    `total + compensation` is the sum with about twice as many bits.
    """
    wanted = value + compensation
    before = total.clone()
    total.add_(wanted)
    compensation.copy_(wanted - (total - before))
    return total


def stochastic_round(
    x: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """Round float32 `x` to one of its two neighbours in `dtype`; the mean is `x`.

    The nearer `x` is to the upper neighbour, the more probably it is rounded up.
    `dtype` must be torch.bfloat16: its bits are the upper half of float32's, so it
    suffices to add 16 random bits and cut off the lower half. Raises ValueError for
    other types.
    """
    if dtype is not torch.bfloat16 or x.dtype is not torch.float32:
        raise ValueError(
            f"x is {x.dtype} and dtype {dtype}; they must be torch.float32 and "
            "torch.bfloat16"
        )
    bits = x.contiguous().view(torch.int32)
    noise = torch.randint(
        0, 2**16, x.shape, dtype=torch.int32, device=x.device, generator=generator
    )
    cut = ((bits + noise) >> 16 << 16).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(dtype)


def sum_in_order(
    values: Tensor, dtype: torch.dtype, order: str = "one by one"
) -> Tensor:
    """Return the sum of N ranks' vectors, rounded to `dtype` after every addition.

    Args:
        values: (N, n), a row for each rank.
        order: "one by one" adds ranks 0, 1, 2, ..., as a naive all-reduce does. "ring"
            does the same, but starts chunk k of n/N elements with rank k + 1, as
            `collectives.ring` does. "tree" adds pairs, then pairs of sums, and so on.

    The result is (n,), of `dtype`. Its error, relative to the sum of all |values|, is
    at most about m eps/2: m is N - 1 one by one and in a ring, and ceil(log2 N) in a
    tree. If rounding errors have random signs, sqrt(m) takes the place of m. Raises
    ValueError for another order.
    """
    check_choice("order", order, ORDERS)
    if order == "ring":
        count, numel = values.shape
        chunk = ((torch.arange(numel) + 1) * count - 1) // numel  # each element's chunk
        ranks = (chunk + 1 + torch.arange(count)[:, None]) % count
        values = values.gather(0, ranks)  # each chunk begins with its first rank
    rows = list(values.to(dtype))
    if order != "tree":
        return sum(rows[1:], start=rows[0])
    while len(rows) > 1:
        odd = rows[-1:] if len(rows) % 2 else []
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)] + odd
    return rows[0]
