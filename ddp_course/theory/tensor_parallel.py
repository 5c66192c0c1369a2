"""What tensor parallelism sends in a step, and what a rank keeps: exact numbers.

One activation between layers has S = B T C numbers. Of the course's GPT with L blocks
on n ranks, all of which work on the same B sequences of T tokens:

    each block    forward 2, backward 2     all-reduces of S numbers
    embedding     forward 1                 the others' tokens are looked up elsewhere
    head          backward 1                the gradient of what all columns are given
    loss          forward 2                 of B T and of 2 B T numbers

With sequence parallelism each all-reduce of S is a reduce-scatter and an all-gather,
which send the same, and two more are at the ends: the embedding's gradient is gathered,
and so is what the head is given. The gradients of parameters that every rank has, but
uses for its own tokens only, are summed: L (6 C) + 2 C numbers, and the positions.

Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2. Chapter 09.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from ddp_course.gpt_config import GPTConfig


@dataclass(frozen=True)
class TensorParallelVolume:
    """What one rank sends in one training step, in bytes, and in how many all-reduces.

    Attributes:
        hidden: activations and their gradients, S numbers at a time.
        loss: what cross-entropy needs of all ranks.
        parameters: gradients of parameters that all have; with sequence parallelism.
        all_reduces: how many, all of these together.
        pairs: reduce-scatters, and as many all-gathers.
    """

    hidden: Fraction
    loss: Fraction
    parameters: Fraction
    all_reduces: int
    pairs: int = 0

    @property
    def total(self) -> Fraction:
        """All bytes together."""
        return self.hidden + self.loss + self.parameters


def tensor_parallel_volume(
    config: GPTConfig,
    batch: int,
    tp_size: int,
    *,
    sequence: int | None = None,
    sequence_parallel: bool = False,
    itemsize: int = 4,
    layers: Iterable[int] | None = None,
) -> TensorParallelVolume:
    """Return what each rank sends in a step.

    Args:
        config: the GPT, of which nothing is frozen.
        batch: B, sequences.
        tp_size: n, ranks.
        sequence: T, tokens of each; None is the block size.
        sequence_parallel: norms and residuals are cut along the sequence.
        itemsize: bytes of a number.
        layers: which of [embed, *blocks, head] these ranks have; all without.

    Chapter 09.
    """
    sequence = config.block_size if sequence is None else sequence
    tokens, last = batch * sequence, config.n_layer + 1
    mine = set(range(last + 1) if layers is None else layers)
    ends = (0 in mine) + (last in mine)
    of_hidden = 4 * (len(mine) - ends) + ends
    of_loss = 2 * (last in mine)
    hidden = of_hidden * tokens * config.d_model * itemsize
    loss = 3 * tokens * itemsize * (last in mine)
    replicated = sum(layer_replicated(config)[layer] for layer in mine) * itemsize
    # Embedding, norms and biases: 1 + 4 for each block + 1.
    pairs = of_hidden if sequence_parallel else 0
    ring = 2 * Fraction(tp_size - 1, tp_size)
    return TensorParallelVolume(
        ring * hidden,
        ring * loss,
        ring * replicated * sequence_parallel,
        all_reduces=of_hidden + of_loss,
        pairs=pairs,
    )


def mlp_volume(
    numel: int, tp_size: int, naive: bool = False, itemsize: int = 4
) -> Fraction:
    """Return the bytes each rank sends for one MLP of 4C, forward and backward.

    `numel` are the numbers of its input, B T C. Column, then row: an all-reduce each
    way, 4 (n - 1)/n of its bytes. `naive`, columns of both matrices, gathered at once:
    results of 4C and C are gathered in forward, and gradients as wide are summed in
    backward: (5 + 2 * 5)(n - 1)/n. Chapter 09.
    """
    times = 15 if naive else 4
    return times * Fraction(tp_size - 1, tp_size) * numel * itemsize


def layer_replicated(config: GPTConfig) -> list[int]:
    """Return how many parameters of each of [embed, *blocks, head] every rank has.

    Positions, norms, and the biases that are added after a sum: T C, 6 C each, 2 C.
    """
    c = config.d_model
    return [config.block_size * c, *[6 * c] * config.n_layer, 2 * c]


def layer_parameters(config: GPTConfig, tp_size: int = 1) -> list[int]:
    """Return the parameters of each of [embed, *blocks, head] on each of n ranks.

    Of what is cut 1/n: V C words, 12 C^2 + 4 C in a block, V C in the head (its own,
    where it is not tied or is on another rank than the embedding). ValueError if they
    cannot be cut equally.
    """
    if config.n_head % tp_size or config.vocab_size % tp_size:
        raise ValueError(
            f"tp_size is {tp_size}; it must divide the {config.n_head} heads and the "
            f"{config.vocab_size} tokens of the vocabulary"
        )
    c, words = config.d_model, config.vocab_size * config.d_model
    cut = [words, *[12 * c * c + 4 * c] * config.n_layer, words]
    common = layer_replicated(config)
    return [n + m // tp_size for n, m in zip(common, cut, strict=True)]


def replicated_parameters(config: GPTConfig) -> int:
    """Return how many parameters of the course's GPT every rank has whole."""
    return sum(layer_replicated(config))


def tensor_parallel_parameters(config: GPTConfig, tp_size: int) -> int:
    """Return how many parameters each of `tp_size` ranks has: 1/n of the others.

    Raises ValueError if they cannot be cut equally. Chapter 09.
    """
    tied = config.tied * config.vocab_size * config.d_model // tp_size
    return sum(layer_parameters(config, tp_size)) - tied
