"""The bytes that a rank stores and sends in a step, by ZeRO stage.

Psi parameters take 16 Psi bytes, whether training is in single precision (4 for the
parameter, 4 for its gradient, 8 for Adam's two states) or in mixed precision (2 + 2,
and 12 for a copy of the parameter and the two states in float32). DDP keeps them all on
every rank. ZeRO divides some of them into N equal shards, one per rank:

    stage 1    the optimizer's states
    stage 2    the gradients, too
    stage 3    the parameters, too: what FSDP does

All results are whole bytes, padding included: of a flat buffer with n elements, every
rank stores ceil(n / N). Source: Rajbhandari et al. 2020, "ZeRO", arXiv:1910.02054,
sections 3.1 and 5. Explained in chapters 06, 07 and 08.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ddp_course.ledger import Ledger
from ddp_course.theory.checks import check_choice

STAGES = (0, 1, 2, 3)  # 0 shards nothing: DDP


@dataclass(frozen=True)
class Precision:
    """The bytes per element of stored tensors and of messages.

    Attributes:
        parameter: bytes of a stored parameter.
        gradient: bytes of a stored gradient.
        master: bytes of the optimizer's own copies: of a parameter, or also of its
            gradient, or 0.
        state: bytes of each of the optimizer's states.
        gathered: bytes of a parameter that stage 3 gathers.
        reduced: bytes of a gradient that stage 3 reduce-scatters.
        activation: bytes of an activation that forward keeps for backward.
    """

    parameter: int
    gradient: int
    master: int
    state: int
    gathered: int
    reduced: int
    activation: int


# `ddp-course plan --help` describes each. `train` can use only the first four.
PRECISIONS = {
    "fp32": Precision(4, 4, 0, 4, 4, 4, 4),
    "bf16": Precision(4, 4, 0, 4, 2, 4, 2),  # by autocast
    "fp16": Precision(4, 4, 0, 4, 2, 4, 2),
    "bf16-pure": Precision(2, 2, 0, 2, 2, 2, 2),
    "fsdp-bf16": Precision(4, 4, 0, 4, 2, 2, 2),
    # With Adam, 16 bytes a parameter, as in the ZeRO paper. Megatron-LM has 18 with
    # bf16 and 20 with fp16 (its README, "Distributed Optimizer"), since it also keeps
    # gradients in float32.
    "mixed": Precision(2, 2, 4, 4, 2, 2, 2),
    "mixed-fp32-gradients": Precision(2, 4, 4, 4, 2, 4, 2),
    "mixed-both-gradients": Precision(2, 2, 8, 4, 2, 2, 2),
}

# {optimizer: the number of states that it keeps for each parameter}
OPTIMIZERS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1}
STEP_BYTES = 4  # Adam counts steps in one float32 for each parameter tensor


def check_stage(stage: int) -> None:
    """Raise ValueError unless `stage` is 0, 1, 2 or 3."""
    if stage not in STAGES or isinstance(stage, bool):
        raise ValueError(f"stage is {stage!r}; it can be 0 (DDP), 1, 2 or 3")


def precision_named(precision: str | Precision) -> Precision:
    """Return the precision with this name. Raises ValueError for an unknown name."""
    if isinstance(precision, Precision):
        return precision
    check_choice("precision", precision, PRECISIONS)
    return PRECISIONS[precision]


def states_of(optimizer: str | int) -> int:
    """Return the number of states per parameter of an optimizer, by name or number."""
    if isinstance(optimizer, int) and not isinstance(optimizer, bool):
        if optimizer >= 0:
            return optimizer
    elif optimizer in OPTIMIZERS:
        return OPTIMIZERS[optimizer]
    known = ", ".join(repr(name) for name in OPTIMIZERS)
    raise ValueError(
        f"optimizer is {optimizer!r}; it can be {known}, or a number of states"
    )


# ---- shards ------------------------------------------------------------------------


def shard_numel(numel: int | Sequence[int], world_size: int) -> int:
    """Return the elements of one rank's shards: ceil(n / N) for each flat buffer.

    `numel` is the size of the one buffer, or a sequence of sizes. Chapters 07 and 08.
    """
    return sum(-(-n // world_size) for n in buffers(numel))


def buffers(numel: int | Sequence[int]) -> Sequence[int]:
    """Return the sizes of the flat buffers; raise ValueError if there are none."""
    sizes = numel if isinstance(numel, Sequence) else [numel]
    if not sizes:
        raise ValueError("numel is empty; it must hold one size or more")
    return sizes


# ---- bytes per rank ----------------------------------------------------------------


def model_states(
    numel: int | Sequence[int],
    world_size: int,
    stage: int = 0,
    optimizer: str | int = "adamw",
    precision: str | Precision = "mixed",
    *,
    step_counts: int = 0,
) -> Ledger:
    """Return the bytes that one rank stores between two steps, by kind.

    With K = master + states x state bytes, for Psi parameters and s = ceil(Psi / N):

        stage 0    parameter Psi + gradient Psi + K Psi
        stage 1    parameter Psi + gradient Psi + K s
        stage 2    parameter Psi + gradient s   + K s
        stage 3    parameter s   + gradient s   + K s

    Stage 3 also holds gathered units, see `gathered_bytes`. With hybrid sharding
    (HSDP), `world_size` is the size of the group that shards.

    Args:
        numel: elements of the model, or of each flat buffer that is cut separately.
        world_size: N.
        stage: 0 (DDP) to 3.
        optimizer: a name in OPTIMIZERS, or its number of states per parameter.
        precision: a name in PRECISIONS, or a `Precision`.
        step_counts: the number of step counters on this rank; Adam has one for each
            tensor that it steps. Negligible, but not 0.

    Raises:
        ValueError: for a value that is not allowed here.

    Source: Rajbhandari et al. 2020, section 5 and table 1. Chapters 06, 07 and 08.
    """
    check_stage(stage)
    bytes_of = precision_named(precision)
    kept = bytes_of.master + states_of(optimizer) * bytes_of.state
    whole, shard = sum(buffers(numel)), shard_numel(numel, world_size)
    states = kept * (shard if stage >= 1 else whole) + STEP_BYTES * step_counts
    return Ledger(
        {
            "parameters": bytes_of.parameter * (shard if stage >= 3 else whole),
            "gradients": bytes_of.gradient * (shard if stage >= 2 else whole),
            "optimizer states": states,
        }
    )


def gathered_bytes(
    units: Sequence[int],
    world_size: int,
    precision: str | Precision = "mixed",
    *,
    gradients: Sequence[int] = (),
) -> int:
    """Return the bytes of the units that stage 3 holds gathered, padding included.

    Args:
        units: the elements of each unit (usually a block) that is gathered at the same
            time: the largest one, or two if the next unit is prefetched; and units that
            stay gathered from forward to backward.
        world_size: N.
        precision: as for `model_states`.
        gradients: the elements of each unit with an unsharded gradient at that time.

    Raises:
        ValueError: for a value that is not allowed here.

    Source: Zhao et al. 2023, "PyTorch FSDP", arXiv:2304.11277, section 3.2. Chapter 08.
    """
    bytes_of = precision_named(precision)
    whole = world_size * shard_numel(units, world_size) if units else 0
    waiting = world_size * shard_numel(gradients, world_size) if gradients else 0
    return bytes_of.gathered * whole + bytes_of.reduced * waiting


# ---- bytes sent ----------------------------------------------------------------------


@dataclass(frozen=True)
class StepVolume:
    """The bytes that each rank sends in one step.

    Attributes:
        reduced: gradients in reduce-scatters, or in the first half of all-reduces.
        gathered: tensors in all-gathers, or in the second half of all-reduces.
    """

    reduced: Fraction
    gathered: Fraction

    @property
    def total(self) -> Fraction:
        """The sum of `reduced` and `gathered`."""
        return self.reduced + self.gathered


def step_volume(
    numel: int | Sequence[int],
    world_size: int,
    stage: int = 0,
    precision: str | Precision = "mixed",
    *,
    reshard_after_forward: bool = True,
) -> StepVolume:
    """Return the bytes that each rank sends in one step, on average over the ranks.

    Each reduce-scatter and each all-gather sends (N-1)/N of the bytes. Their number in
    a step:

        stage 0       all-reduce of the gradients = reduce-scatter + all-gather: 2
        stages 1, 2   reduce-scatter of the gradients, all-gather of the parameters: 2
        stage 3       all-gather in forward, all-gather in backward, reduce-scatter: 3,
                      or 2 if the blocks stay gathered (reshard_after_forward=False)

    Sharded stages send padding, too. Raises ValueError as `model_states`. Source:
    Rajbhandari et al. 2020, section 7. Chapters 07 and 08.
    """
    check_stage(stage)
    bytes_of = precision_named(precision)
    if stage == 0:
        once = Fraction(world_size - 1, world_size) * sum(buffers(numel))
        return StepVolume(once * bytes_of.gradient, once * bytes_of.gradient)
    once = Fraction((world_size - 1) * shard_numel(numel, world_size))
    if stage < 3:
        return StepVolume(once * bytes_of.gradient, once * bytes_of.parameter)
    times = 2 if reshard_after_forward else 1
    return StepVolume(once * bytes_of.reduced, times * once * bytes_of.gathered)
