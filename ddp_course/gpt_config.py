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
        for name in (f.name for f in fields(GPTConfig) if f.name != "tied"):
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
        """The multiply-adds of each layer, `[embed, *blocks, head]`, in forward.

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
        """Return why `ranks` ranks cannot share these fields equally, or None."""
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


@dataclass(frozen=True)
class MixtureConfig(GPTConfig):
    """The sizes of a GPT that has a mixture of experts in place of each MLP.

    Attributes:
        experts: E, the number of MLPs in each block.
        experts_per_token: k, how many of them each token uses.
        capacity: an expert takes at most ceil(T k capacity / E) tokens of a sequence of
            T; None: all tokens that are routed to it.
        balance: the weight of the auxiliary loss of each block.

    Capacity and auxiliary loss are defined for each sequence alone, so that they do not
    depend on how the rows are divided among ranks and microbatches. Chapter 17.
    """

    experts: int = 8
    experts_per_token: int = 2
    capacity: float | None = None
    balance: float = 0.01

    def __post_init__(self) -> None:
        """Check every value."""
        super().__post_init__()
        for name, least in (("experts", 2), ("experts_per_token", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ValueError(
                    f"{name} is {value!r}; it must be a whole number >= {least}"
                )
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}; there are only "
                f"{self.experts} experts"
            )
        if self.capacity is not None and not self.capacity > 0:
            raise ValueError(f"capacity is {self.capacity!r}; it must be above 0")
        if not self.balance >= 0:
            raise ValueError(f"balance is {self.balance!r}; it must be 0 or more")

    @property
    def num_parameters(self) -> int:
        """The number of parameters; a block has E MLPs (8C² + 5C) and a router (EC)."""
        c, more = self.d_model, self.experts - 1
        each = more * (8 * c * c + 5 * c) + self.experts * c  # MLPs, router
        return super().num_parameters + self.n_layer * each

    @property
    def layer_costs(self) -> list[int]:
        """The multiply-adds of each layer; in a block, those of k MLPs and a router."""
        t, c, k = self.block_size, self.d_model, self.experts_per_token
        more = t * c * (8 * c * (k - 1) + self.experts)
        first, *blocks, last = super().layer_costs
        return [first, *(block + more for block in blocks), last]


def check_dense(config: GPTConfig) -> None:
    """Raise ValueError for a GPT with experts, for which most formulas are wrong."""
    if isinstance(config, MixtureConfig):
        raise ValueError(
            f"experts is {config.experts}, and this formula is for a GPT without "
            "experts; for experts, see theory.mixture_cost and theory.dispatch_volume"
        )


PRESETS = {
    "1m": GPTConfig(),
    "8m": GPTConfig(block_size=128, n_layer=8, n_head=12, d_model=288),
}
