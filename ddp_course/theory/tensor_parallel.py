"""The bytes that a rank sends in a step of tensor parallelism, and its parameters.

One activation between layers has S = B T C numbers. In the course's GPT with L blocks
on n ranks, all of which compute the same B sequences of T tokens, the all-reduces are:

    each block    2 of S in forward, 2 of S in backward
    embedding     1 of S in forward: sums vectors, each of which one rank looked up
    head          1 of S in backward: sums the gradient of the head's input
    loss          2 in forward, of B T and of 2 B T numbers

With sequence parallelism each all-reduce of S is a reduce-scatter and an all-gather,
which send the same bytes. Two of the all-gathers are at the ends of the model: they
gather the embedding's gradient and the head's input. The gradients of parameters that
all ranks have, but that each uses only for its own tokens, are summed: L (6 C) + 2 C
numbers in one all-reduce, and the positions in another.

Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2. Chapter 09.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from ddp_course.gpt_config import GPTConfig, check_dense


@dataclass(frozen=True)
class TensorParallelVolume:
    """The bytes that one rank sends in one training step, and its collectives.

    Attributes:
        hidden: bytes of activations and their gradients, S numbers at a time.
        loss: bytes for cross-entropy.
        parameters: bytes of gradients of replicated parameters, with sequence
            parallelism.
        all_reduces: the number of all-reduces. With sequence parallelism one is enough
            for the gradients of all norms and biases, unless a pipeline calls the
            layers one by one: then each has its own.
        pairs: the number of reduce-scatters, and of all-gathers.
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
    """Return the bytes that each rank sends in a step, and its collectives.

    Args:
        config: the GPT, without frozen parameters.
        batch: B, sequences.
        tp_size: n, ranks.
        sequence: T, tokens of each; None is the block size.
        sequence_parallel: whether norms and residuals are cut along the sequence.
        itemsize: bytes of a number.
        layers: the indices in [embed, *blocks, head] that these ranks have; None: all.

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
    pairs = of_hidden if sequence_parallel else 0
    together = sequence_parallel and layers is None  # 1 all-reduce for norms and biases
    ring = 2 * Fraction(tp_size - 1, tp_size)
    return TensorParallelVolume(
        ring * hidden,
        ring * loss,
        ring * replicated * sequence_parallel,
        all_reduces=(2 if together else of_hidden) + of_loss,
        pairs=pairs,
    )


def mlp_volume(
    numel: int, tp_size: int, naive: bool = False, itemsize: int = 4
) -> Fraction:
    """Return the bytes that each rank sends for an MLP 4C wide, forward and backward.

    `numel` is the number of elements of its input, B T C. If the first matrix is cut by
    columns and the second by rows, there is an all-reduce in forward and one in
    backward: 4 (n - 1)/n of the input's bytes. With `naive`, both are cut by columns:
    forward gathers results of 4C and C, and backward sums gradients of the same sizes:
    (5 + 2 * 5)(n - 1)/n. Chapter 09.
    """
    times = 15 if naive else 4
    return times * Fraction(tp_size - 1, tp_size) * numel * itemsize


def layer_replicated(config: GPTConfig) -> list[int]:
    """Return the number of replicated parameters in each of [embed, *blocks, head].

    These are positions, norms, and the biases added after a sum: T C, 6 C each, 2 C.
    Raises ValueError for a GPT with experts.
    """
    check_dense(config)
    c = config.d_model
    return [config.block_size * c, *[6 * c] * config.n_layer, 2 * c]


def layer_parameters(config: GPTConfig, tp_size: int = 1) -> list[int]:
    """Return one rank's number of parameters in each of [embed, *blocks, head].

    A rank has 1/n of the parameters that are cut: V C in the embedding, 12 C^2 + 4 C in
    a block, V C in the head (also if it is tied), and all replicated ones. Raises
    ValueError if they cannot be cut equally.
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
    """Return the number of replicated parameters in the course's GPT."""
    return sum(layer_replicated(config))


def tensor_parallel_parameters(config: GPTConfig, tp_size: int) -> int:
    """Return the number of parameters that each of `tp_size` ranks has.

    Raises ValueError if they cannot be cut equally. Chapter 09.
    """
    tied = config.tied * config.vocab_size * config.d_model // tp_size
    return sum(layer_parameters(config, tp_size)) - tied
