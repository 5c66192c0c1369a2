"""The plan of the stages, as plain data: which rank has which layers.

    stage 0 on rank 0: embed, blocks.0 (273,312 parameters)
    stage 1 on rank 1: blocks.1, blocks.2, blocks.3, head (764,928 parameters)

The slowest stage sets the pace of all, so the cuts should balance the stages.
`partition` gets the cost of each layer in any unit: multiply-adds, which can be counted
(`GPTConfig.layer_costs`), or seconds, which can be measured.

A parameter may be used in two stages: the tied GPT's output matrix is its token
embedding. Then both ranks have a copy and a part of the gradient, and the copies stay
equal if the two parts are summed before each step (`SharedGradients`). Chapter 10.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Real

import torch
from torch import Tensor, nn

from ddp_course.collectives.endpoint import Endpoint
from ddp_course.pipeline.runtime import Runtime
from ddp_course.pipeline.stages import spine


@dataclass(frozen=True)
class StagePlan:
    """The layers and the rank of each stage.

    Attributes:
        layers: the names of each stage's layers, in the order of the model.
        ranks: the rank of each stage, counted in the pipeline.
        numel: the number of elements of each stage's parameters.
        holders: name of a parameter in the model -> the ranks that use it.
    """

    layers: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...]
    numel: tuple[int, ...]
    holders: Mapping[str, tuple[int, ...]]

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several ranks use: name -> ranks."""
        return {name: ranks for name, ranks in self.holders.items() if len(ranks) > 1}

    def __str__(self) -> str:
        each = enumerate(zip(self.ranks, self.layers, self.numel, strict=True))
        lines = [
            f"stage {stage} on rank {rank}: {', '.join(names)} ({numel:,} parameters)"
            for stage, (rank, names, numel) in each
        ]
        lines += [
            f"{name} on ranks {', '.join(map(str, ranks))}: gradients are summed"
            for name, ranks in self.shared.items()
        ]
        return "\n".join(lines)


def stage_plan(
    model: nn.Module, sizes: Sequence[int], ranks: Sequence[int]
) -> StagePlan:
    """Cut the model's spine into stages of `sizes` layers. Pure.

    Args:
        model: a model with a `spine`.
        sizes: the number of layers of each stage, 1 or more.
        ranks: the rank of each stage.

    A rank without any parameter shares the model's smallest parameter, as an optimizer
    needs at least one. Raises ValueError if `sizes` and `ranks` do not fit the model or
    each other.
    """
    layers = spine(model)
    if len(sizes) != (n := len(ranks)):
        many = f"sizes {list(sizes)} is for {len(sizes)} stages"
        raise ValueError(f"{many}; the schedule has {n}")
    if min(sizes, default=0) < 1 or sum(sizes) != len(layers):
        raise ValueError(
            f"sizes is {list(sizes)}; it must be a number of layers for each stage, 1 "
            f"or more, together {len(layers)}"
        )
    names, holders = list(layers), {}
    cuts = [tuple(names[a:b]) for a, b in pairwise(accumulate(sizes, initial=0))]
    own = [{p for name in cut for p in layers[name].parameters()} for cut in cuts]
    for name, parameter in model.named_parameters():
        users = {r for r, used in zip(ranks, own, strict=True) if parameter in used}
        if not users:
            raise ValueError(f"{name} belongs to no layer of the model's spine")
        holders[name] = tuple(sorted(users))
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    for rank in set(ranks).difference(*holders.values()):
        smallest = min(trained or holders, key=lambda name: trained.get(name, 0))
        holders[smallest] = tuple(sorted({rank, *holders[smallest]}))
    numel = tuple(sum(p.numel() for p in used) for used in own)
    return StagePlan(tuple(cuts), tuple(ranks), numel, holders)


# ---- where to cut --------------------------------------------------------------------


def partition(costs: Sequence[Real], num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least 1.

    The most expensive stage costs as little as possible. Among all such partitions,
    the result has the smallest sum of squared costs, which balances the other stages,
    too; of several such partitions, it has the most layers in the last stages. The same
    costs always give the same sizes. `partition([0, 4, 4, 4, 4, 1], 2)` is `(3, 3)`.

    Raises ValueError for a negative or infinite cost, for fewer than one stage, and for
    more stages than layers. Source: dynamic programming, Bellman 1957. Chapter 10.
    """
    if num_stages not in range(1, (layers := len(costs)) + 1):
        why = f"there are {layers} layers, and each stage needs one"
        raise ValueError(f"num_stages is {num_stages}; {why}")
    for layer, cost in enumerate(costs):
        if not 0 <= cost < math.inf:
            must = "it must be a finite number, 0 or more"
            raise ValueError(f"costs[{layer}] is {cost!r}; {must}")
    upto = [0, *accumulate(costs)]  # upto[i]: cost of layers 0 to i - 1

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
    """Return the cheapest cut of 0 to `count` into `parts` ranges: price and borders.

    The best cut of 0 to `last` into k ranges is the best cut of 0 to some `first` into
    k - 1 ranges, and the range from `first` to `last`; all values of `first` are tried.
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


# ---- parameters that several ranks use -----------------------------------------------


class SharedGradients:
    """A part that sums the gradients of parameters that several ranks use.

    Every rank sends its part to each of the others, and all add in the order of the
    ranks, so they get the same bits, and the copies of a parameter stay equal. Each of
    k ranks sends k - 1 times the bytes of the gradient.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shared: Mapping[str, Sequence[int]],
        rank: int,
    ) -> None:
        self.rank = rank
        self.shared = {
            parameters[name]: list(ranks)
            for name, ranks in shared.items()
            if rank in ranks and parameters[name].requires_grad
        }
        self.before: dict[nn.Parameter, Tensor | None] = {}

    def before_run(self, runtime: Runtime) -> None:
        """Set aside the gradients of earlier steps: they were summed already."""
        if torch.is_grad_enabled():
            self.before = {parameter: parameter.grad for parameter in self.shared}
            for parameter in self.before:
                parameter.grad = None

    def after_run(self, runtime: Runtime) -> None:
        """Sum the gradients of this step; an evaluation has none."""
        if torch.is_grad_enabled():
            self.sum(runtime.endpoint)

    @torch.no_grad()
    def sum(self, endpoint: Endpoint) -> None:
        """Replace each gradient with its sum over the ranks plus earlier gradients."""
        for parameter, ranks in self.shared.items():
            own = parameter.grad
            own = torch.zeros_like(parameter) if own is None else own.contiguous()
            parts = {r: own if r == self.rank else torch.empty_like(own) for r in ranks}
            peers = [r for r in ranks if r != self.rank]
            endpoint.exchange([(own, r) for r in peers], [(parts[r], r) for r in peers])
            parameter.grad = parts[ranks[0]].clone()
            for r in ranks[1:]:
                parameter.grad += parts[r]
            if self.before[parameter] is not None:
                parameter.grad += self.before[parameter]
        self.before = {}
