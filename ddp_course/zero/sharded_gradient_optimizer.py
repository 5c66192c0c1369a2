"""ZeRO stage 2 with all that one trains with: `Zero2`, and the list of its parts.

Chapter 07.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ddp_course.mechanisms.agreement import agreed
from ddp_course.zero.optimizer_guards import ShardsOnly
from ddp_course.zero.stage2 import SMALLER_CAP_MB, Zero2
from ddp_course.zero.zero_redundancy_optimizer import ZeroRedundancyOptimizer


class ShardedGradientOptimizer(ZeroRedundancyOptimizer, Zero2):
    """Runs `optimizer_class` on 1/N of all elements, with 1/N of states and gradients.

    As `ZeroRedundancyOptimizer`, but after `backward` there is only this rank's shard
    of the mean gradients, and every parameter's `grad` is None. So gradients are zeroed
    by this object's `zero_grad`, which must be called between `step` and the next
    backward: `module.zero_grad()` finds nothing to zero. There is no `no_sync`: every
    backward pass is averaged, and the means add up.

    Args:
        params, optimizer_class, process_group, options: as of
            `ZeroRedundancyOptimizer`.
        buckets_in_flight: how many buckets may have memory at once, 1 or more; with 1
            backward waits for every bucket. (Their `bucket_cap_mb` is 4: what is on its
            way is not sharded, so buckets are smaller here.)

    Raises RuntimeError from `backward` if the gradients of the last step are still
    there, and what `ZeroRedundancyOptimizer` raises. PyTorch has no stage 2 of its own;
    FSDP's SHARD_GRAD_OP comes close. Rajbhandari et al. 2020, section 5.2. Chapter 07.
    """

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
        """Return the parts of this stage alone."""
        return [ShardsOnly()]

    def no_sync(self) -> AbstractContextManager[None]:
        """Refuse: gradients that are not averaged are whole, on every rank."""
        raise RuntimeError(
            "stage 2 keeps no whole gradients, so every backward pass is averaged, and "
            "their means add up; ZeroRedundancyOptimizer (stage 1) has no_sync"
        )
