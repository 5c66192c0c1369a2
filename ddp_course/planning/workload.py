"""A model and one step's batch, and the FLOPs that a token costs.

A multiply-add counts as two FLOPs. For each token, forward multiplies by each of N
parameters (2 N), and backward does so twice (4 N). Attention compares the token with T
tokens (4 L h T in forward, 12 L h T in all; the part that causal masks hide counts,
as is usual):

    FLOPs per token = 6 N + 12 L h T

N counts the output matrix once and no lookup table. Recomputation is never counted
here, so a model FLOPs utilization (MFU) falls when a layout recomputes.

Sources: Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, appendix B; Narayanan et al.
2021, arXiv:2104.04473, section 5.1. Chapter 18.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddp_course.gpt_config import GPTConfig, check_dense

HEAD = 128  # channels of a head, by default
ASPECT = 100  # hidden / layers of many published models: GPT-3 128, Llama 3 70B 102


@dataclass(frozen=True)
class Workload:
    """A transformer and the batch of one step.

    Attributes:
        parameters: the number of all parameters, embeddings included.
        layers: L, the number of layers.
        hidden: h, channels between layers.
        heads: heads of queries.
        sequence: T, tokens of a row.
        vocab: V, tokens of the vocabulary.
        rows: rows of one step's batch, on all GPUs together.
        kv_heads: heads of keys and values; 0 means as many as of queries.
        tied: whether the output matrix is the token embedding.
        learned_positions: whether there is a table with a row for each position.

    Raises ValueError if the heads, or the embeddings, do not fit the other numbers.
    """

    parameters: int
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocab: int
    rows: int
    kv_heads: int = 0
    tied: bool = False
    learned_positions: bool = False

    def __post_init__(self) -> None:
        """Check that heads divide channels, and that layers have parameters."""
        if self.hidden % self.heads:
            raise ValueError(
                f"heads is {self.heads}; it must divide hidden, which is {self.hidden}"
            )
        if self.parameters <= self.embeddings:
            raise ValueError(
                f"parameters is {self.parameters:,}; the embeddings of {self.vocab:,} "
                f"words in {self.hidden:,} channels alone are {self.embeddings:,}"
            )

    @classmethod
    def of_size(cls, parameters: int, sequence: int, vocab: int, rows: int) -> Workload:
        """Return a model with this many parameters, in the usual shape.

        A layer has about 12 h² parameters, heads have 128 channels, and h is about
        100 L; heads and layers are multiples of 8, except in small models, so that
        they can be divided.
        """
        hidden = (ASPECT * parameters / 12) ** (1 / 3)
        heads = _rounded(hidden / HEAD)
        while heads > 1 and parameters <= 2.5 * vocab * heads * HEAD:
            heads -= 1
        hidden = HEAD * heads
        layers = _rounded((parameters - 2 * vocab * hidden) / (12 * hidden**2))
        return cls(parameters, layers, hidden, heads, sequence, vocab, rows)

    @classmethod
    def of_gpt(cls, config: GPTConfig, rows: int) -> Workload:
        """Return the workload of the course's GPT with `rows` rows in each batch.

        Raises ValueError for a GPT with experts.
        """
        check_dense(config)
        return cls(
            config.num_parameters, config.n_layer, config.d_model, config.n_head,
            config.block_size, config.vocab_size, rows, tied=config.tied,
            learned_positions=True,
        )  # fmt: skip

    @property
    def positions(self) -> int:
        """The parameters of the position embedding, which tp does not divide."""
        return self.sequence * self.hidden if self.learned_positions else 0

    @property
    def embeddings(self) -> int:
        """Parameters of the token embedding and, unless tied, of the output matrix."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def block(self) -> float:
        """Parameters of one layer."""
        outside = self.embeddings + self.positions
        return (self.parameters - outside) / self.layers

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.rows * self.sequence

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of one token, forward and backward: 6 N + 12 L h T."""
        multiplying = self.layers * self.block + self.vocab * self.hidden
        return 6 * multiplying + 12 * self.layers * self.hidden * self.sequence

    def days(self, tokens: float, seconds: float) -> float:
        """Return how many days `tokens` tokens take at `seconds` seconds a step."""
        return math.ceil(tokens / self.tokens) * seconds / 86_400


def _rounded(number: float) -> int:
    """Return the nearest multiple of 8; below 12, the nearest integer of 1 or more."""
    return 8 * round(number / 8) if number >= 12 else max(1, round(number))
