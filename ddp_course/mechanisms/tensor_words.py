"""Describe a tensor in words, so that ranks can compare what they have.

Chapters 04, 09 and 10.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor


def kind_of(value: Any) -> str:
    """Say what a tensor is: "int64 [8, 64]"; of what is no tensor, its type."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def described(value: Any) -> str:
    """Say also what is in it: "int64 [8, 64] with digest 3f0c5be99a1d7c26".

    Where ranks work on one batch together, each says so which one it was given. In data
    parallelism every rank has a batch of its own; where ranks share a model, that would
    be a mistake that no shape shows. Chapters 09 and 10.
    """
    if not isinstance(value, Tensor) or value.is_meta:
        return kind_of(value)
    return f"{kind_of(value)} with digest {digest(value)}"


def digest(tensor: Tensor) -> str:
    """Return 16 hexadecimal digits that change if any number does, but by chance."""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.blake2b(flat.numpy(), digest_size=8).hexdigest()
