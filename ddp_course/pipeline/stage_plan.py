"""Who has which layers: decided before anything is computed, as plain data.

    stage 0 on rank 0: embed, blocks.0 (273,312 parameters)
    stage 1 on rank 1: blocks.1, blocks.2, blocks.3, head (764,928 parameters)

A parameter may be used in two stages: the tied GPT's output matrix is its token
embedding. Then both ranks have a copy, and the copies stay equal if the two gradients
are summed before each step (`shared_gradients`). Chapter 10.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from ddp_course.pipeline.stages import spine


@dataclass(frozen=True)
class StagePlan:
    """Which layers each stage has, and on which rank it is.

    Attributes:
        layers: for each stage the names of its layers, in the order of the model.
        ranks: for each stage its rank, counted in the pipeline.
        numel: for each stage the elements of its parameters.
        holders: parameter, by its name in the model -> the ranks that use it.
    """

    layers: tuple[tuple[str, ...], ...]
    ranks: tuple[int, ...]
    numel: tuple[int, ...]
    holders: Mapping[str, tuple[int, ...]]

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters that several ranks use, with these ranks."""
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
    """Cut the model's spine into stages of so many layers each. Pure.

    Args:
        model: with a `spine`.
        sizes: for each stage the number of its layers, 1 or more.
        ranks: for each stage its rank.

    A rank whose layers have no parameter shares the smallest one of the model, so that
    its optimizer, too, has something to step. Raises ValueError if `sizes` and `ranks`
    do not fit the model or each other.
    """
    layers = spine(model)
    if len(sizes) != (n := len(ranks)):
        told = f"sizes {list(sizes)} is for {len(sizes)} stages"
        raise ValueError(f"{told}; the schedule has {n}")
    if min(sizes, default=0) < 1 or sum(sizes) != len(layers):
        raise ValueError(
            f"sizes is {list(sizes)}; it must be a number of layers for each stage, 1 "
            f"or more, together {len(layers)}"
        )
    names, holders = list(layers), {}
    cuts = [tuple(names[a:b]) for a, b in pairwise(accumulate(sizes, initial=0))]
    own = [{p for name in cut for p in layers[name].parameters()} for cut in cuts]
    for name, parameter in model.named_parameters():
        users = {r for r, its in zip(ranks, own, strict=True) if parameter in its}
        if not users:
            raise ValueError(f"{name} belongs to no layer of the model's spine")
        holders[name] = tuple(sorted(users))
    trained = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    for rank in set(ranks).difference(*holders.values()):
        smallest = min(trained or holders, key=lambda name: trained.get(name, 0))
        holders[smallest] = tuple(sorted({rank, *holders[smallest]}))
    numel = tuple(sum(p.numel() for p in its) for its in own)
    return StagePlan(tuple(cuts), tuple(ranks), numel, holders)
