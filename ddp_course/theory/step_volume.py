"""How many bytes a rank sends in one training step, for DDP and each ZeRO stage.

Explained in chapters 07 and 08.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ddp_course.theory.checks import check_world
from ddp_course.theory.memory import (
    Precision,
    buffers,
    check_stage,
    precision_named,
    shard_numel,
)


@dataclass(frozen=True)
class StepVolume:
    """What each rank sends in one step, in bytes.

    Attributes:
        reduced: gradients on their way to be added up (the first half of an
            all-reduce, or a reduce-scatter).
        gathered: what is then brought back to all (the second half, or all-gathers).
    """

    reduced: Fraction
    gathered: Fraction

    @property
    def total(self) -> Fraction:
        """Both together."""
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

    Each time something passes all ranks it costs (N-1)/N of its bytes:

        stage 0       all-reduce of the gradients = reduce-scatter + all-gather: 2
        stages 1, 2   reduce-scatter of the gradients, all-gather of the parameters: 2
        stage 3       all-gather in forward, all-gather in backward, reduce-scatter: 3,
                      or 2 if the blocks stay gathered (reshard_after_forward=False)

    Sharded stages send padding, too. Raises ValueError as `model_states`. Source:
    Rajbhandari et al. 2020, section 7. Chapters 07 and 08.
    """
    check_stage(stage)
    check_world(world_size)
    bytes_of = precision_named(precision)
    if stage == 0:
        once = Fraction(world_size - 1, world_size) * sum(buffers(numel))
        return StepVolume(once * bytes_of.gradient, once * bytes_of.gradient)
    once = Fraction((world_size - 1) * shard_numel(numel, world_size))
    if stage < 3:
        return StepVolume(once * bytes_of.gradient, once * bytes_of.parameter)
    times = 2 if reshard_after_forward else 1
    return StepVolume(once * bytes_of.reduced, times * once * bytes_of.gathered)
