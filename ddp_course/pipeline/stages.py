"""Stages: a model that is cut between its layers.

The course's GPT is a list of layers (`spine`): the output of each is the next one's
input. A stage is a slice of this list. All names stay those of the whole model, so the
state of the whole model is the union of the ranks' states. Chapter 10.
"""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn


def spine(model: nn.Module) -> dict[str, nn.Module]:
    """Return {name: layer}; calling the layers one after another runs the model.

    The layers of an `nn.Sequential` are its members; those of the course's GPT, or of
    any model with the same attributes, are embed, the blocks and head. Raises TypeError
    for any other model.
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


def add_layers(module: nn.Module, layers: Mapping[str, nn.Module]) -> nn.Module:
    """Add layers to `module` under the names they have in the model; return it.

    "blocks.2" becomes the member "2" of the member "blocks", which is created if
    needed.
    """
    for name, layer in layers.items():
        *path, last = name.split(".")
        holder = module
        for step in path:
            if step not in holder._modules:
                holder.add_module(step, nn.Module())
            holder = holder.get_submodule(step)
        holder.add_module(last, layer)
    return module


class Stage(nn.Sequential):
    """A slice of the spine; with targets, as in the last stage, it returns the loss."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        loss_fn: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        super().__init__(*layers)
        self.loss_fn = loss_fn

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Call the layers in turn: (B, T) or (B, T, C) -> (B, T, C), or a scalar."""
        x = super().forward(x)
        return x if targets is None else self.loss_fn(x, targets)
