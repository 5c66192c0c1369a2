"""Where to cut a model into stages: the slowest stage sets the pace of all.

`partition` gets what each layer costs, in any unit: multiply-adds, which one can count
(`layer_costs`), or seconds, which one can measure. Chapter 10.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from numbers import Real

from ddp_course.model import GPTConfig
from ddp_course.theory.checks import check_count, check_not_negative


def partition(costs: Sequence[Real], num_stages: int) -> tuple[int, ...]:
    """Return how many layers each stage has, one at least.

    The most expensive stage costs as little as it can. Among all such partitions the
    one with the smallest sum of squares is taken, which keeps the other stages alike,
    too, and of several the one with the most layers in its last stages. The same costs
    always give the same sizes. `partition([0, 4, 4, 4, 4, 1], 2)` is `(3, 3)`.

    Raises ValueError for a negative or infinite cost, for fewer than one stage, and for
    more stages than layers. Source: dynamic programming, Bellman 1957. Chapter 10.
    """
    check_count("num_stages", num_stages)
    if num_stages > (layers := len(costs)):
        why = f"there are {layers} layers, and each stage needs one"
        raise ValueError(f"num_stages is {num_stages}; {why}")
    for layer, cost in enumerate(costs):
        check_not_negative(f"costs[{layer}]", cost)
    upto = [0, *accumulate(costs)]  # upto[i]: the cost of layers 0 to i - 1

    def stage(first: int, last: int) -> Real:
        return upto[last] - upto[first]

    def squared(first: int, last: int) -> Real:
        return stage(first, last) ** 2 if stage(first, last) <= least else math.inf

    least, _ = _best(len(costs), num_stages, stage, max)
    _, ends = _best(len(costs), num_stages, squared, lambda one, other: one + other)
    return tuple(last - first for first, last in pairwise(ends))


def _best(
    count: int,
    parts: int,
    price: Callable[[int, int], Real],
    join: Callable[[Real, Real], Real],
) -> tuple[Real, list[int]]:
    """Cut 0 to `count` into `parts` ranges; return the lowest price, and the ends.

    The best cut into k ranges that ends at `last` is one range, and before it the best
    cut into k - 1 ranges of what is left.
    """
    best = {last: (price(0, last), [0, last]) for last in range(1, count + 1)}
    for k in range(2, parts + 1):
        best = {
            last: min(
                (join(best[first][0], price(first, last)), [*best[first][1], last])
                for first in range(k - 1, last)
            )
            for last in range(k, count + 1)
        }
    return best[count]


def layer_costs(config: GPTConfig) -> list[int]:
    """Return the multiply-adds of each of `[embed, *blocks, head]` in forward.

    For one row of T tokens (the block size), C channels and V characters: the embedding
    looks up and adds, 0; a block's matrices take 12 T C² and the two products of
    attention 2 T² C, half of which is masked, but not saved everywhere; the head takes
    T C V. Backward takes about twice as much of each, so the shares are the same.
    Chapter 10.
    """
    t, c = config.block_size, config.d_model
    block = 12 * t * c * c + 2 * t * t * c
    return [0, *[block] * config.n_layer, t * c * config.vocab_size]
