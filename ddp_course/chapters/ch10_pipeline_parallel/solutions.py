"""Solutions of the exercises of chapter 10."""

from collections.abc import Callable
from functools import cache
from itertools import accumulate

from torch import Tensor, nn


def my_gpipe(num_stages: int, num_microbatches: int, rank: int) -> list[str]:
    """Return what `rank` does: all forwards of its stage, then all backwards."""
    return [
        f"{rank}{op}{microbatch}"
        for op in "FB"
        for microbatch in range(num_microbatches)
    ]


def my_cut(costs: list[float], num_stages: int) -> list[int]:
    """Return the layers per stage with which the most expensive stage costs least."""
    before = list(accumulate(costs, initial=0))  # the cost of the first k layers

    @cache
    def best(first: int, stages: int) -> tuple[float, list[int]]:
        """Return (cost of the worst stage, sizes) of the best cut from `first` on."""
        last = len(costs) - stages + 1  # leave a layer for each other stage
        if stages == 1:
            return before[-1] - before[first], [len(costs) - first]
        found = []
        for end in range(first + 1, last + 1):
            dearest, sizes = best(end, stages - 1)
            own = before[end] - before[first]
            found.append((max(own, dearest), [end - first, *sizes]))
        return min(found)

    return best(0, num_stages)[1]


def my_stage_step(
    stage: nn.Module,
    num_microbatches: int,
    forward_in: Callable[[int], Tensor],
    forward_out: Callable[[int, Tensor], None],
    backward_in: Callable[[int], Tensor],
    backward_out: Callable[[int, Tensor | None], None],
) -> None:
    """Run a stage's step of GPipe; autograd's graph ends at both of its boundaries."""
    kept = []
    for k in range(num_microbatches):
        x = forward_in(k)
        if x.is_floating_point():  # the first stage gets tokens
            x.requires_grad_()
        y = stage(x)
        forward_out(k, y.detach())
        kept.append((x, y))
    for k, (x, y) in enumerate(kept):
        gradient = backward_in(k)
        if y.requires_grad:  # false if a first stage is frozen
            y.backward(gradient)
        backward_out(k, x.grad)
