"""Where rounding hurts: updates that are lost, and sums that depend on their order.

A weight w and an update u are numbers of a format; w + u is rounded to it again. If u
is less than half of the distance to the next number, the sum is w: the update is lost,
and so is the next one, for ever. Three cures; the first two keep what is lost:

    a master copy     add in more bits, and round a copy          4 bytes a parameter
    compensation      remember what was lost, and add it to the   2 bytes a parameter
                      next update (Kahan)
    stochastic        round up or down by chance, so that the     no memory, but noise
    rounding          mean is right

Higham 2002, "Accuracy and Stability of Numerical Algorithms", sections 4.2 and 4.3;
Gupta et al. 2015, "Deep Learning with Limited Numerical Precision". Chapter 12.
"""

import torch
from torch import Tensor

from ddp_course.theory.checks import check_choice

ORDERS = ("one by one", "tree", "ring")


def lost(weight: Tensor, update: Tensor) -> Tensor:
    """Tell, for each element, whether adding a non-zero `update` changes nothing.

    Both of one floating type and shape, as is the result, of bool.
    """
    return (weight + update == weight) & (update != 0)


def kahan_add_(total: Tensor, compensation: Tensor, value: Tensor) -> Tensor:
    """Add `value` to `total`, and to `compensation` what the addition has lost.

    All of one shape and type; the first two are changed in place, `total` is returned.
    `total + compensation` is what would be there with about twice as many bits.
    """
    wanted = value + compensation
    before = total.clone()
    total.add_(wanted)
    compensation.copy_(wanted - (total - before))
    return total


def stochastic_round(
    x: Tensor, dtype: torch.dtype, generator: torch.Generator | None = None
) -> Tensor:
    """Round float32 `x` to one of its two neighbours in `dtype`: its mean is `x`.

    Up with the probability of the part of the way that `x` has gone to the upper one.
    `dtype` is torch.bfloat16: its bits are the upper half of float32's, so that adding
    16 random bits and cutting the lower half off does it. ValueError for another.
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
        values: (N, n), what each rank has.
        order: "one by one": rank 0's and rank 1's, and so on, one after the other, as a
            naive all-reduce; "ring": the same, but chunk k of n/N elements begins
            with rank k + 1, as in `collectives.ring`; "tree": neighbours, then
            neighbours of those: log2(N) deep.

    (n,), of `dtype`. Relative to the sum of all |values|, the error is at most about
    (N - 1) eps/2 one by one and in a ring, ceil(log2 N) eps/2 in a tree; with random
    signs it is about the root of that. Raises ValueError for another order.
    """
    check_choice("order", order, ORDERS)
    if order == "ring":
        count, numel = values.shape
        chunk = ((torch.arange(numel) + 1) * count - 1) // numel  # of each element
        ranks = (chunk + 1 + torch.arange(count)[:, None]) % count
        values = values.gather(0, ranks)  # each chunk from its first rank on
    rows = list(values.to(dtype))
    if order != "tree":
        return sum(rows[1:], start=rows[0])
    while len(rows) > 1:
        odd = rows[-1:] if len(rows) % 2 else []
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)] + odd
    return rows[0]
