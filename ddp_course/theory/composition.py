"""The stored and sent bytes of one rank in a composition dp x tp x pp x cp.

Axes compose because each divides the parameters that the previous one left. With
[embed, *blocks, head] as the layers of the course's GPT, a rank stores

    pp    the layers of its stages
    tp    1/tp of their matrices, and all their other         layer_parameters
          parameters
    dp    the share that ZeRO leaves of these parameters,     model_states
          their gradients and states

and sends, along each axis, in a step of B rows for each data-parallel rank

    tp    for its layers                                      tensor_parallel_volume
    pp    B T C numbers for every boundary of its stages, from every tp rank: the
          activation in forward, its gradient in backward; and the gradient of a tied
          embedding. With cp, a rank has T/cp of the T tokens
    cp    keys and values of its blocks, for its share of     attention_volume
          the heads
    dp    for its parameters, averaged over dp and cp         step_volume
    replicas
          with hybrid sharding (HSDP), for its shard: 2 (R-1)/R of Psi / F

So hybrid sharding sends 3 Psi (F-1)/F inside a shard group and 2 (Psi/F)(R-1)/R between
groups. Messages of a number or two (the loss, a norm, agreements) are not counted.
Sources: those of the single formulas; Zhao et al. 2023, "PyTorch FSDP",
arXiv:2304.11277, section 3.2.2. The tests of `parallelize` compare with byte meters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ddp_course.gpt_config import GPTConfig
from ddp_course.ledger import Ledger
from ddp_course.theory.context_parallel import attention_volume
from ddp_course.theory.memory import (
    Precision,
    model_states,
    precision_named,
    shard_numel,
    step_volume,
)
from ddp_course.theory.tensor_parallel import layer_parameters, tensor_parallel_volume


@dataclass(frozen=True)
class AxisBytes:
    """The bytes that one rank sends in a step along each axis.

    `dp`: to the group that shards or averages gradients, the ranks of dp and cp.
    `replicas`: to ranks with the same shard (HSDP). `cp`: for attention alone.
    """

    tp: Fraction
    pp: Fraction
    dp: Fraction
    replicas: Fraction
    cp: Fraction = Fraction(0)


@dataclass(frozen=True)
class ComposedRank:
    """A rank of a composition.

    Attributes:
        config: the course's GPT.
        stages: the layers of each of the rank's stages; None: one stage with all.
        dp, tp: ranks along these axes; `dp // replicas` ranks share one model.
        replicas: R, the number of such groups (HSDP).
        zero: the ZeRO stage along dp, 0 to 3.
        buffers: elements of each flat buffer that is cut separately. By default, all of
            the rank's parameters are one buffer; with stage 3, each unit is one.
        precision: as for `model_states`; the optimizer is AdamW.
        cp: ranks that share each sequence.
        attention: one of `spec.ATTENTION`: how keys and values reach the ranks of cp.

    Raises ValueError for a value that is not allowed here.
    """

    config: GPTConfig
    stages: Sequence[range] | None = None
    dp: int = 1
    tp: int = 1
    replicas: int = 1
    zero: int = 0
    buffers: Sequence[int] | None = None
    precision: str | Precision = "fp32"
    cp: int = 1
    attention: str = "ring"

    def __post_init__(self) -> None:
        """Check the arguments that the formulas do not check; fill in defaults."""
        layers = self.config.n_layer + 2
        stages = [range(layers)] if self.stages is None else list(self.stages)
        if not stages or any(not s or s[0] < 0 or s[-1] >= layers for s in stages):
            raise ValueError(
                f"stages are {self.stages!r}; each must have some of layers 0 to "
                f"{layers - 1}"
            )
        object.__setattr__(self, "stages", stages)
        if self.dp % self.replicas:
            text = f"replicas is {self.replicas}; it must divide dp, {self.dp}"
            raise ValueError(text)
        if self.config.block_size % self.cp:
            raise ValueError(
                f"cp is {self.cp}; it must divide the {self.config.block_size} tokens"
            )
        units = self.units()
        if self.buffers is None:
            buffers = units if self.zero == 3 else [sum(units)]
            object.__setattr__(self, "buffers", buffers)
        if sum(self.buffers) != sum(units):
            raise ValueError(
                f"buffers have {sum(self.buffers)} elements; they must have as many "
                f"as the rank's parameters, {sum(units)}"
            )

    @property
    def layers(self) -> list[int]:
        """The layers of all the rank's stages."""
        return [layer for stage in self.stages for layer in stage]

    @property
    def one_end(self) -> bool:
        """Whether the rank has one of embedding and head, but not both."""
        return (0 in self.layers) != (self.config.n_layer + 1 in self.layers)

    def units(self) -> list[int]:
        """Return the number of the rank's parameters in each unit of stage 3.

        The first unit has embedding and head, if the rank has either; then each block
        is a unit. Raises ValueError as `layer_parameters`.
        """
        numel, c = layer_parameters(self.config, self.tp), self.config
        ends = [layer for layer in self.layers if layer in (0, c.n_layer + 1)]
        root = sum(numel[layer] for layer in ends)
        if c.tied and ends and not self.one_end:  # embedding and head share a matrix
            root -= c.vocab_size * c.d_model // self.tp
        blocks = [numel[layer] for layer in self.layers if layer not in ends]
        return [root] * (root > 0) + blocks

    @property
    def shards(self) -> int:
        """The number of ranks, of dp and cp, that share one model's states."""
        return self.dp * self.cp // self.replicas

    def states(self, step_counts: int = 0) -> Ledger:
        """Return the bytes that the rank stores between two steps, by kind."""
        options = self.zero, "adamw", self.precision
        counts = {"step_counts": step_counts}
        return model_states(self.buffers, self.shards, *options, **counts)

    def volume(self, batch: int) -> AxisBytes:
        """Return the bytes that the rank sends in a step, in all microbatches.

        Each data-parallel rank has `batch` rows, which are as long as the model's block
        size, T. If a ring's chunks are unequal, this is the mean over its ranks.
        """
        c, width = self.config, precision_named(self.precision)
        tokens = c.block_size // self.cp
        options = {"itemsize": width.activation, "layers": self.layers}
        in_tp = tensor_parallel_volume(c, batch, self.tp, sequence=tokens, **options)
        hidden = batch * tokens * c.d_model * width.activation
        ends = [(stage[0] > 0) + (stage[-1] <= c.n_layer) for stage in self.stages]
        in_pp = sum(ends) * hidden
        if c.tied and self.one_end:  # another rank has the same matrix: sum gradients
            in_pp += c.vocab_size * c.d_model // self.tp * width.gradient
        in_dp = step_volume(self.buffers, self.shards, self.zero, self.precision)
        sent = width.reduced if self.zero == 3 else width.gradient
        across = 2 * Fraction(self.replicas - 1, self.replicas) * sent
        across *= shard_numel(self.buffers, self.shards)
        in_cp = attention_volume(
            *(self.attention, self.cp),
            batch=batch,
            length=c.block_size,
            heads=c.n_head // self.tp,
            d_head=c.d_model // c.n_head,
            itemsize=width.activation,
        )
        blocks = sum(0 < layer <= c.n_layer for layer in self.layers)
        of_cp = blocks * in_cp.total
        return AxisBytes(in_tp.total, Fraction(in_pp), in_dp.total, across, of_cp)
