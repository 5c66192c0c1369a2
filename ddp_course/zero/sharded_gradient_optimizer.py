"""ZeRO stage 2 with all features: `Zero2` and the parts of stage 1.

`ShardsOnly` raises for mistakes that would be silent in stage 2 only.

Chapter 07.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import agreed
from ddp_course.mechanisms.engine import Engine
from ddp_course.zero.optimizer_guards import ADVICE
from ddp_course.zero.stage2 import SMALLER_CAP_MB, Zero2
from ddp_course.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer


class ShardedGradientOptimizer(ZeroRedundancyOptimizer, Zero2):
    """An optimizer that stores only 1/N of states and gradients on each rank.

    Unlike with `ZeroRedundancyOptimizer`, after `backward` a rank has only its shard of
    the mean gradients, and every parameter's `grad` is None. So call this object's
    `zero_grad` between `step` and the next backward: `module.zero_grad()` finds nothing
    to zero. There is no `no_sync`: every backward pass is averaged, and the means add
    up.

    Args:
        params, optimizer_class, process_group, options: as for
            `ZeroRedundancyOptimizer`.
        buckets_in_flight: how many buckets may have memory at once, 1 or more; with 1,
            backward waits for every bucket. (`bucket_cap_mb` is 4 by default: a bucket
            in flight is not sharded, so smaller ones save memory.)

    Raises the errors of `ZeroRedundancyOptimizer`, and RuntimeError from `backward` if
    the gradients of the last step were not zeroed. PyTorch has no stage 2 of its own;
    FSDP's SHARD_GRAD_OP is close to it. Rajbhandari et al. 2020, section 5.2.
    Chapter 07.
    """

    gradients_in_shards = True  # and in no `grad`; `mechanisms.guards` reads it

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        *,
        buckets_in_flight: int = 2,
        **options: Any,
    ) -> None:
        limit = buckets_in_flight

        def check() -> None:
            if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
                raise ValueError(
                    f"buckets_in_flight is {limit!r}; it must be a whole number >= 1"
                )

        agreed(check, process_group, **{"argument buckets_in_flight": repr(limit)})
        self.buckets_in_flight = limit
        options = {"bucket_cap_mb": SMALLER_CAP_MB, **options}
        super().__init__(params, optimizer_class, process_group, **options)

    def make_parts(self) -> list[Any]:
        """Return the parts that only this stage has."""
        return [ShardsOnly()]

    def no_sync(self) -> AbstractContextManager[None]:
        """Raise RuntimeError: gradients that are not averaged need whole buckets."""
        raise RuntimeError(
            "stage 2 stores no whole gradients, so it averages every backward pass, "
            "and the means add up; ZeroRedundancyOptimizer (stage 1) has no_sync"
        )


class ShardsOnly:
    """A guard of stage 2: refuses gradients outside of the shards, and stale shards."""

    stepped = False  # whether a step has used the present shards

    def pass_begins(self, engine: Engine) -> None:
        """Raise RuntimeError if the shards were not zeroed after the last step."""
        if self.stepped and engine.reducer.shards:
            raise RuntimeError(
                "the gradients of the last step were not zeroed: call this optimizer's "
                "zero_grad() before backward; module.zero_grad() cannot reach a shard"
            )

    def gradients_complete(self, optimizer: Any) -> None:
        """Raise RuntimeError for a gradient that this optimizer would ignore."""
        for slot in optimizer.engine.slots:
            if slot.parameter.grad is not None:
                raise RuntimeError(
                    f"parameter {slot.name} has a gradient that this optimizer did not "
                    f"write; its own gradients are in shards. {ADVICE}"
                )

    def after_step(self, optimizer: Any) -> None:
        """Record that a step has used the shards."""
        self.stepped = True

    def zeroed(self, optimizer: Any, set_to_none: bool) -> None:
        """Record that the shards are zero, or freed."""
        self.stepped = False
