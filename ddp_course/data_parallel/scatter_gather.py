"""Cut a batch into one part for each replica, and join what the replicas return.

Inputs and outputs may be nested: lists, tuples, named tuples and dicts of tensors. Both
functions use only operations that autograd records (split, copy, concatenate), so
gradients flow back through them. PyTorch: torch/nn/parallel/scatter_gather.py.
Explained in chapter 04.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def part_sizes(rows: int, replicas: int) -> list[int]:
    """Return the number of rows of each replica, without replicas that get none.

    As in `torch.chunk`, each replica gets rows / replicas, rounded up, until no rows
    are left. So 5 rows for 4 replicas give [2, 2, 1], and the fourth replica is idle. 0
    rows give [0].
    """
    most = max(1, -(-rows // replicas))
    return [min(most, rows - start) for start in range(0, rows, most)] or [0]


def scatter(inputs: Any, devices: Sequence[torch.device]) -> list[Any]:
    """Return, for each replica that gets any rows, its part of `inputs` on its device.

    Tensors are cut by rows, and all must have the same number of rows; any other object
    goes to all replicas. Inputs without a tensor are one part. Raises ValueError, with
    the shapes, if the tensors have different numbers of rows.
    """
    leaves, structure = tree_flatten(inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rows = {len(tensor) if tensor.ndim else None for tensor in tensors} or {0}
    if len(rows) > 1 or None in rows:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(
            f"the inputs have the shapes {shapes}; all must have the same number of "
            "rows, because they are cut at the same rows. Pass a value that all rows "
            "share as a number, or make it a buffer of the module"
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
    """Return the replicas' outputs, joined on `device`.

    Tensors are joined by rows; scalar tensors, such as losses, become a vector with one
    number for each replica. Anything else must be equal in all outputs. Raises
    ValueError if the outputs differ in structure or cannot be joined.
    """
    trees = [tree_flatten(output) for output in outputs]
    for k, (_, structure) in enumerate(trees):
        if structure != trees[0][1]:
            raise ValueError(
                f"replica {k} and replica 0 return outputs of different structure: "
                f"{structure} and {trees[0][1]}"
            )
    together = zip(*(leaves for leaves, _ in trees), strict=True)
    return tree_unflatten([_join(leaves, device) for leaves in together], trees[0][1])


def _join(leaves: tuple[Any, ...], device: torch.device) -> Any:
    """Join one leaf of each replica's output."""
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
                f"joined; all dimensions but the first must be equal"
            ) from error
    if any(isinstance(leaf, Tensor) or leaf != leaves[0] for leaf in leaves):
        raise ValueError(
            f"the replicas return {', '.join(map(repr, leaves))}; each output must be "
            f"a tensor on all replicas, or equal on all replicas"
        )
    return leaves[0]
