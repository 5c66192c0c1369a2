"""Stages: a model that is cut between its layers, and who has which piece.

The course's GPT is a list of layers, each the next one's input: `spine`. A stage is a
slice of it. Which slice, and on which rank, is decided first, as plain data:

    stage 0 on rank 0: embed, blocks.0 (273,312 parameters)
    stage 1 on rank 1: blocks.1, blocks.2, blocks.3, head (764,928 parameters)

All names are those of the whole model, so the state of the whole is what the ranks have
together. A parameter may be used in two stages: the tied GPT's output matrix is its
token embedding. Then both have it, and it stays the same on both if the two gradients
are summed before each step (`shared_gradients`). Chapter 10.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor, nn

from ddp_course.model import cross_entropy


def spine(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that, called one after another, are the model, by name.

    Of an `nn.Sequential` they are its members, of the course's GPT embed, the blocks
    and head, as of any model with these attributes. Raises TypeError for another.
    """
    if isinstance(model, nn.Sequential):
        return dict(model._modules)
    if not all(hasattr(model, name) for name in ("embed", "blocks", "head")):
        raise TypeError(
            f"a {type(model).__name__} has no spine: it must be an nn.Sequential, or "
            "have the layers embed, blocks (a list) and head"
        )
    blocks = {f"blocks.{k}": block for k, block in enumerate(model.blocks)}
    return {"embed": model.embed, **blocks, "head": model.head}


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


class Stage(nn.Sequential):
    """A slice of the spine: from the activations before it to those after it.

    The last stage goes on to the loss, if it is given targets.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    ) -> None:
        super().__init__(*layers)
        self.loss_fn = loss_fn

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Call layer after layer: (B, T) or (B, T, C) -> (B, T, C), or a scalar loss.

        Raises TypeError if a layer returns anything but a tensor: that is all that can
        be sent.
        """
        for layer in self:
            x = layer(x)
            if not isinstance(x, Tensor):
                raise TypeError(
                    f"a {type(layer).__name__} returned a {type(x).__name__}; between "
                    "the layers of a pipeline there must be one tensor"
                )
        return x if targets is None else self.loss_fn(x, targets)


def part_of_model(layers: Mapping[str, nn.Module]) -> nn.Module:
    """Return a module that has these layers under the names they have in the model."""
    part = nn.Module()
    for name, layer in layers.items():
        *path, last = name.split(".")
        holder = part
        for step in path:
            if step not in holder._modules:
                holder.add_module(step, nn.Module())
            holder = holder.get_submodule(step)
        holder.add_module(last, layer)
    return part
