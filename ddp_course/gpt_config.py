"""The configuration of the course's GPT, and two presets.

Plain data, without PyTorch: so the command line can check a model's sizes at once.
`model.build_gpt` builds the model. Chapter 00.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT. The defaults are the preset "1m".

    12 heads and 144 or 288 channels can be cut into 2, 3, 4, 6 or 12 equal parts. With
    `tied`, the output matrix is the token embedding itself. Raises ValueError for a
    value with which no model can be built.
    """

    vocab_size: int = 96
    block_size: int = 64
    n_layer: int = 4
    n_head: int = 12
    d_model: int = 144
    tied: bool = False

    def __post_init__(self) -> None:
        """Check every value."""
        for name in (field.name for field in fields(self) if field.name != "tied"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number >= 1")
        if type(self.tied) is not bool:
            raise ValueError(f"tied is {self.tied!r}; it can be True or False")
        if self.d_model % self.n_head:
            raise ValueError(
                f"d_model is {self.d_model}; it must be a multiple of n_head, "
                f"which is {self.n_head}"
            )

    @property
    def num_parameters(self) -> int:
        """The number of parameters: L(12C² + 10C) + TC + 2C + VC (2VC if not tied)."""
        v, c = self.vocab_size, self.d_model
        blocks = self.n_layer * (12 * c * c + 10 * c)
        return (
            blocks + self.block_size * c + 2 * c + (v * c if self.tied else 2 * v * c)
        )

    @property
    def layer_costs(self) -> list[int]:
        """The multiply-adds of each of `[embed, *blocks, head]` in forward.

        For one row of T tokens (the block size), C channels and V characters: the
        embedding only looks up and adds, which counts as 0; a block's matrices take
        12 T C² and the two products of attention 2 T² C (half of them are masked, but
        not every implementation skips those); the head takes T C V. Backward takes
        about twice as much for each layer, so the layers' shares are the same. Chapter
        10.
        """
        t, c = self.block_size, self.d_model
        block = 12 * t * c * c + 2 * t * t * c
        return [0, *[block] * self.n_layer, t * c * self.vocab_size]

    def indivisible(self, names: Sequence[str], ranks: int) -> str | None:
        """Return why so many ranks cannot divide these fields equally, or None."""
        sizes = {name: getattr(self, name) for name in names}
        for name, size in sizes.items():
            if size % ranks:
                most = math.gcd(*sizes.values())
                fits = [str(n) for n in range(1, most + 1) if most % n == 0]
                return (
                    f"{name} is {size}, which {ranks} ranks cannot share equally; this "
                    f"model can be cut for {', '.join(fits)} ranks"
                )
        return None


PRESETS = {
    "1m": GPTConfig(),
    "8m": GPTConfig(block_size=128, n_layer=8, n_head=12, d_model=288),
}
