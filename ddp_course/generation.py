"""Generate text with a GPT; cached keys and values make the next character cheap.

The next character needs the attention of one new position to all earlier ones. The
earlier positions' keys and values do not change, since no position looks ahead. So a
`KeyValueCache` keeps them, and a forward computes the new positions alone.

The cache finds the attention layers in its model, so it needs to know nothing about
ranks: a tensor-parallel model computes some heads on each rank, so each rank caches
these heads; a pipeline's stage caches the layers that it has. `generate` is for one
process and for tensor parallelism, `pipeline.decoding` for pipelines. Chapter 10.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.model import Attention, Embedding


class KeyValueCache:
    """A model, and the keys and values of all positions that it has computed so far.

    Args:
        model: a GPT, one that `tensor_parallel` has cut, or some layers of one. The
            model is not changed; several caches, each for its own rows, may share it.

    Attributes:
        length: the number of positions that are cached.
        kept: for each attention layer its keys and values, each (B, H, length, D).

    Raises ValueError for a model that `context_parallel` has divided.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is {model!r}; it must be an nn.Module")
        for layer in model.modules():
            if isinstance(layer, Attention) and "attend" in vars(layer):
                raise ValueError(
                    "the model is context parallel: its ranks divide the positions, "
                    "which this cache keeps whole; use tensor_parallel or a pipeline"
                )
        self.model, self.length = model, 0
        self.kept: dict[Attention, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Any:
        """Return what the model returns for new positions, after those in the cache.

        `x`: tokens (B, T) or activations (B, T, C) of T new positions of the same rows.
        """
        with self._connected():
            y = self.model(x)
        self.length += x.shape[1]
        return y

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from new positions (B, H, T, D) to themselves and all earlier ones."""
        if attention in self.kept:
            keys, values = self.kept[attention]
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        self.kept[attention] = k, v  # (B, H, length + T, D)
        new, all_positions = q.shape[2], k.shape[2]
        sees = torch.ones(new, all_positions, dtype=torch.bool, device=q.device)
        sees = sees.tril(all_positions - new)  # the last new position sees everything
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(t.nbytes for pair in self.kept.values() for t in pair)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Let attention layers use the cache, and embeddings skip cached positions."""
        layers = list(self.model.modules())
        attentions = [layer for layer in layers if isinstance(layer, Attention)]
        shifted = [
            layer.positions.register_forward_pre_hook(self._shift)
            for layer in layers
            if isinstance(layer, Embedding)
        ]
        for attention in attentions:
            attention.attend = partial(self.attend, attention)
        try:
            yield
        finally:
            for attention in attentions:
                del attention.attend  # now it is the class's method again
            for hook in shifted:
                hook.remove()

    def _shift(self, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0] + self.length,)


def most_likely(logits: Tensor) -> Tensor:
    """Return the most likely token after the last position: (B, T, V) -> (B, 1)."""
    return logits[:, -1:].argmax(-1)


@torch.no_grad()
def generate(model: nn.Module, idx: Tensor, new_tokens: int) -> Tensor:
    """Return `idx` (B, T), int64, continued by the most likely tokens: (B, T + new).

    Each forward but the first computes one position. The ranks of a tensor-parallel
    model call it together, with the same tokens, and all return the result. Raises
    ValueError if the model has too few positions.
    """
    check_length(model, idx, new_tokens)
    cache, new = KeyValueCache(model), idx
    for _ in range(new_tokens):
        new = most_likely(cache(new)[0])  # (B, 1)
        idx = torch.cat([idx, new], 1)
    return idx


@torch.no_grad()
def generate_naively(model: nn.Module, idx: Tensor, new_tokens: int) -> Tensor:
    """Return what `generate` returns, computing all positions again for each token."""
    check_length(model, idx, new_tokens)
    for _ in range(new_tokens):
        idx = torch.cat([idx, most_likely(model(idx)[0])], 1)
    return idx


def check_length(model: nn.Module, idx: Tensor, new_tokens: int) -> None:
    """Raise ValueError unless the model has a position for each token that it reads."""
    if not hasattr(getattr(model, "config", None), "block_size"):
        raise ValueError("model has no config.block_size; it must be the course's GPT")
    if not isinstance(idx, Tensor) or idx.ndim != 2 or idx.is_floating_point():
        what = type(idx).__name__
        if isinstance(idx, Tensor):
            what = f"{idx.dtype} {tuple(idx.shape)}"
        raise ValueError(f"idx is {what}; it must be an int64 tensor of shape (B, T)")
    if not isinstance(new_tokens, Integral):
        raise ValueError(f"new_tokens is {new_tokens!r}; it must be an integer")
    positions, longest = idx.shape[1] + new_tokens - 1, model.config.block_size
    if new_tokens < 1 or positions > longest:
        raise ValueError(
            f"new_tokens is {new_tokens}; after {idx.shape[1]} tokens it can be 1 to "
            f"{longest - idx.shape[1] + 1}, as the model has {longest} positions"
        )
