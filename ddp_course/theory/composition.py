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

from ddp_course.measure import Ledger
from ddp_course.model import GPTConfig
from ddp_course.theory.checks import check_count
from ddp_course.theory.memory import (
    Precision,
    model_states,
    precision_named,
    shard_numel,
    step_volume,
)
from ddp_course.theory.tensor_parallel import layer_parameters, tensor_parallel_volume

Stages = Sequence[range]  # of a rank: which of [embed, *blocks, head] each of them has


@dataclass(frozen=True)
class AxisBytes:
    """What one rank sends in a step along each axis, in bytes; dp inside its shards.

    `replicas` is what goes to the ranks that have the same shard (HSDP).
    """

    tp: Fraction
    pp: Fraction
    dp: Fraction
    replicas: Fraction


def rank_units(
    config: GPTConfig, stages: Stages | None = None, tp: int = 1
) -> list[int]:
    """Return how many parameters a rank has in each unit of stage 3.

    First those of no block (embedding and head), if it has any, then each block. The
    model's own, without `stages`; raises ValueError as `layer_parameters`.
    """
    numel = layer_parameters(config, tp)
    layers = [layer for stage in _stages(config, stages) for layer in stage]
    ends = [layer for layer in layers if layer in (0, len(numel) - 1)]
    root = sum(numel[layer] for layer in ends)
    if config.tied and len(ends) == 2:  # one matrix, if one rank has both its ends
        root -= config.vocab_size * config.d_model // tp
    blocks = [numel[layer] for layer in layers if layer not in ends]
    return [root] * (root > 0) + blocks


def rank_states(
    config: GPTConfig,
    stages: Stages | None = None,
    *,
    dp: int = 1,
    tp: int = 1,
    replicas: int = 1,
    zero: int = 0,
    buffers: Sequence[int] | None = None,
    precision: str | Precision = "fp32",
    step_counts: int = 0,
) -> Ledger:
    """Return the bytes that a rank keeps between two steps, by kind.

    Args:
        config: the course's GPT.
        stages: the layers of the rank's stages; all without.
        dp, tp: ranks along these axes; of dp, `dp // replicas` share their shards.
        replicas: R, groups of ranks that have the same shards (HSDP).
        zero: what is sharded along dp: stage 0 (nothing) to 3.
        buffers: elements of each flat buffer that is cut on its own; by default all of
            the rank's parameters are one, and with stage 3 each unit is.
        precision, step_counts: as for `model_states`; the optimizer is AdamW.

    Raises ValueError for a value outside of this.
    """
    numel = _buffers(rank_units(config, stages, tp), zero, buffers)
    shards = _shards(dp, replicas)
    return model_states(
        numel, shards, zero, "adamw", precision, step_counts=step_counts
    )


def rank_volume(
    config: GPTConfig,
    batch: int,
    stages: Stages | None = None,
    *,
    dp: int = 1,
    tp: int = 1,
    replicas: int = 1,
    zero: int = 0,
    buffers: Sequence[int] | None = None,
    precision: str | Precision = "fp32",
) -> AxisBytes:
    """Return the bytes that a rank sends in one step, along each axis.

    On average over the ranks of an axis, where a ring's pieces are of unequal sizes.

    Args:
        batch: B, rows of each data rank, in all its microbatches together; as long as
            the model's block size, T.
        others: as for `rank_states` and `step_volume`.

    Raises ValueError for a value outside of this.
    """
    mine, shards = _stages(config, stages), _shards(dp, replicas)
    numel = _buffers(rank_units(config, stages, tp), zero, buffers)
    width = precision_named(precision)
    layers = [layer for stage in mine for layer in stage]
    in_tp = tensor_parallel_volume(
        config, batch, tp, itemsize=width.activation, layers=layers
    )[0]
    tokens = batch * config.block_size
    last = config.n_layer + 1
    boundaries = sum((stage[0] > 0) + (stage[-1] < last) for stage in mine)
    in_pp = boundaries * tokens * config.d_model * width.activation
    if config.tied and (0 in layers) != (last in layers):  # the other end has it, too
        in_pp += config.vocab_size * config.d_model // tp * width.gradient
    in_dp = step_volume(numel, shards, zero, precision)
    across = 2 * Fraction(replicas - 1, replicas) * shard_numel(numel, shards)
    sent = width.reduced if zero == 3 else width.gradient
    return AxisBytes(in_tp.total, Fraction(in_pp), in_dp.total, across * sent)


def _stages(config: GPTConfig, stages: Stages | None) -> Stages:
    layers = config.n_layer + 2
    whole = [range(layers)] if stages is None else list(stages)
    if not whole or any(not s or s[0] < 0 or s[-1] >= layers for s in whole):
        raise ValueError(
            f"stages are {stages!r}; each must have some of layers 0 to {layers - 1}"
        )
    return whole


def _shards(dp: int, replicas: int) -> int:
    check_count("dp", dp)
    check_count("replicas", replicas)
    if dp % replicas:
        raise ValueError(f"replicas is {replicas}; it must divide dp, {dp}")
    return dp // replicas


def _buffers(
    units: list[int], zero: int, buffers: Sequence[int] | None
) -> Sequence[int]:
    if buffers is None:
        return units if zero == 3 else [sum(units)]
    if sum(buffers) != sum(units):
        raise ValueError(
            f"buffers have {sum(buffers)} elements; the rank has {sum(units)}"
        )
    return buffers
