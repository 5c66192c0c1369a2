"""What a rank of dp x tp x pp keeps and sends in a step: what each axis says, in turn.

Axes compose because each divides what the one before has left. With [embed, *blocks,
head] as the layers of the course's GPT, a rank has

    pp    the layers of its stages
    tp    of their matrices 1/tp, of the rest all             layer_parameters
    dp    of parameters, gradients and states what ZeRO       model_states, of these
          leaves it

and sends, along each axis to other ranks, in a step of B rows for each data rank

    tp    of its layers only                                  tensor_parallel_volume
    pp    B T C numbers for every boundary of its stages, whole on every tp rank: the
          activation forward, its gradient back; and the gradient of a tied embedding
    dp    of its parameters only                              step_volume
    replicas
          with hybrid sharding (HSDP), of its shard only: 2 (R-1)/R of Psi / F

So one can read off hybrid sharding's 3 Psi (F-1)/F inside and 2 (Psi/F)(R-1)/R across.
Counts that are a number or two (the loss, a norm, what ranks agree on) are left out.
Sources: those of the single formulas; Zhao et al. 2023, "PyTorch FSDP",
arXiv:2304.11277, section 3.2.2. Held against the meters by the tests of `parallelize`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ddp_course.gpt_config import GPTConfig
from ddp_course.ledger import Ledger
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
    """What one rank sends in a step along each axis, in bytes; dp inside its shards.

    `replicas` is what goes to the ranks that have the same shard (HSDP).
    """

    tp: Fraction
    pp: Fraction
    dp: Fraction
    replicas: Fraction


@dataclass(frozen=True)
class ComposedRank:
    """A rank of a composition.

    Attributes:
        config: the course's GPT.
        stages: the layers of the rank's stages; all if there are none.
        dp, tp: ranks along these axes; of dp, `dp // replicas` share their shards.
        replicas: R, groups of ranks that have the same shards (HSDP).
        zero: what is sharded along dp: stage 0 (nothing) to 3.
        buffers: elements of each flat buffer that is cut on its own; by default all of
            the rank's parameters are one, and with stage 3 each unit is.
        precision: as for `model_states`; the optimizer is AdamW.

    Raises ValueError for a value outside of this.
    """

    config: GPTConfig
    stages: Sequence[range] | None = None
    dp: int = 1
    tp: int = 1
    replicas: int = 1
    zero: int = 0
    buffers: Sequence[int] | None = None
    precision: str | Precision = "fp32"

    def __post_init__(self) -> None:
        """Check what the formulas do not."""
        layers = self.config.n_layer + 2
        stages = [range(layers)] if self.stages is None else list(self.stages)
        if not stages or any(not s or s[0] < 0 or s[-1] >= layers for s in stages):
            raise ValueError(
                f"stages are {self.stages!r}; each must have some of layers 0 to "
                f"{layers - 1}"
            )
        object.__setattr__(self, "stages", stages)
        if self.dp % self.replicas:
            told = f"replicas is {self.replicas}; it must divide dp, {self.dp}"
            raise ValueError(told)
        units = self.units()
        if self.buffers is None:
            buffers = units if self.zero == 3 else [sum(units)]
            object.__setattr__(self, "buffers", buffers)
        if sum(self.buffers) != sum(units):
            raise ValueError(
                f"buffers have {sum(self.buffers)} elements; the rank has {sum(units)}"
            )

    @property
    def layers(self) -> list[int]:
        """The rank's layers, of all its stages."""
        return [layer for stage in self.stages for layer in stage]

    @property
    def one_end(self) -> bool:
        """Whether the rank has the embedding, or the head, and another the other."""
        return (0 in self.layers) != (self.config.n_layer + 1 in self.layers)

    def units(self) -> list[int]:
        """Return how many parameters the rank has in each unit of stage 3.

        First those of no block (embedding and head), if it has any, then each block.
        Raises ValueError as `layer_parameters`.
        """
        numel, c = layer_parameters(self.config, self.tp), self.config
        ends = [layer for layer in self.layers if layer in (0, c.n_layer + 1)]
        root = sum(numel[layer] for layer in ends)
        if c.tied and ends and not self.one_end:  # one matrix: it has both its ends
            root -= c.vocab_size * c.d_model // self.tp
        blocks = [numel[layer] for layer in self.layers if layer not in ends]
        return [root] * (root > 0) + blocks

    def states(self, step_counts: int = 0) -> Ledger:
        """Return the bytes that it keeps between two steps, by kind."""
        how = self.zero, "adamw", self.precision
        shards = self.dp // self.replicas
        return model_states(self.buffers, shards, *how, step_counts=step_counts)

    def volume(self, batch: int) -> AxisBytes:
        """Return the bytes that it sends in a step of `batch` rows of each data rank.

        Of all its microbatches together; rows are as long as the model's block size, T.
        On average over the ranks of an axis, where a ring's pieces are of unequal
        sizes.
        """
        c, width = self.config, precision_named(self.precision)
        how = {"itemsize": width.activation, "layers": self.layers}
        in_tp = tensor_parallel_volume(c, batch, self.tp, **how)
        hidden = batch * c.block_size * c.d_model * width.activation
        ends = [(stage[0] > 0) + (stage[-1] <= c.n_layer) for stage in self.stages]
        in_pp = sum(ends) * hidden
        if c.tied and self.one_end:  # the rank with the other end has the matrix, too
            in_pp += c.vocab_size * c.d_model // self.tp * width.gradient
        shards = self.dp // self.replicas
        in_dp = step_volume(self.buffers, shards, self.zero, self.precision)
        sent = width.reduced if self.zero == 3 else width.gradient
        across = 2 * Fraction(self.replicas - 1, self.replicas) * sent
        across *= shard_numel(self.buffers, shards)
        return AxisBytes(in_tp.total, Fraction(in_pp), in_dp.total, across)
