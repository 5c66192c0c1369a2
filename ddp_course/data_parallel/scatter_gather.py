"""Cut a batch into one part for each replica, and join what the replicas return.

Inputs and outputs may be nested: lists, tuples, named tuples and dicts of tensors. Both
functions are made of operations that autograd knows (split, copy, concatenate), so
gradients flow back through them. PyTorch: torch/nn/parallel/scatter_gather.py.
Explained in chapter 04.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def part_sizes(rows: int, replicas: int) -> list[int]:
    """Return how many rows each replica gets, for those that get any.

    As `torch.chunk`: equally many, rounded up, until there are no more. So 5 rows for 4
    replicas are [2, 2, 1], and the fourth replica is idle. No rows are one part.
    """
    most = max(1, -(-rows // replicas))
    return [min(most, rows - start) for start in range(0, rows, most)] or [0]


def scatter(inputs: Any, devices: Sequence[torch.device]) -> list[Any]:
    """Return, for each replica that gets any rows, its part of `inputs` on its device.

    Tensors are cut by rows, of which all must have equally many; anything else is the
    same object for all replicas. Without a tensor there is no batch: one part. Raises
    ValueError, with the shapes, for tensors that cannot be cut together.
    """
    leaves, structure = tree_flatten(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rows = {len(tensor) if tensor.ndim else None for tensor in tensors} or {0}
    if len(rows) > 1 or None in rows:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"the inputs have the shapes {shapes}; to be cut at the same rows, all "
            "must have equally many. What is the same for all rows can be a number or "
            "a buffer of the module"
        )
    sizes = part_sizes(rows.pop(), len(devices))
    cuts = [_cut(leaf, sizes, devices) for leaf in leaves]
    return [
        tree_unflatten([cut[k] for cut in cuts], structure) for k in range(len(sizes))
    ]


def _cut(leaf: Any, sizes: list[int], devices: Sequence[torch.device]) -> list[Any]:
    if not isinstance(leaf, Tensor):
        return [leaf] * len(sizes)
    return [part.to(to) for part, to in zip(leaf.split(sizes), devices, strict=False)]


def gather(outputs: Sequence[Any], device: torch.device) -> Any:
    """Return the replicas' outputs as one, on `device`.

    Tensors are joined by rows; those of no dimension, such as losses, become a vector
    with one number for each replica. Anything else must be equal in all outputs. Raises
    ValueError if the outputs are not built alike or cannot be joined.
    """
    trees = [tree_flatten(output) for output in outputs]
    for k, (_, structure) in enumerate(trees):
        if structure != trees[0][1]:
            raise ValueError(
                f"the outputs of replica {k} and replica 0 are not built alike: "
                f"{structure} and {trees[0][1]}"
            )
    together = zip(*(leaves for leaves, _ in trees), strict=True)
    return tree_unflatten([_join(leaves, device) for leaves in together], trees[0][1])


def _join(leaves: tuple[Any, ...], device: torch.device) -> Any:
    """Join what the replicas return in one place of their outputs."""
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        parts = [leaf.to(device) for leaf in leaves]
        if all(part.ndim == 0 for part in parts):
            return torch.stack(parts)
        try:
            return torch.cat(parts)
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise ValueError(
                f"the replicas return tensors of the shapes {shapes}, which cannot be "
                f"joined"
            ) from error
    if any(isinstance(leaf, Tensor) or leaf != leaves[0] for leaf in leaves):
        raise ValueError(
            f"the replicas return {', '.join(map(repr, leaves))}: only tensors can be "
            f"joined, or what is the same in all outputs"
        )
    return leaves[0]
