"""ZeRO stage 2: gradients are sharded, too.

Of the mean gradients a rank needs its own part only, so why keep the rest? In stage 1
every bucket has its memory all the time. Here it is there from the bucket's first
gradient to the end of its reduce-scatter; what stays is this rank's shard of the mean.
No `grad` outlives its own arrival: the parameters' `grad` are None. How that is done:
`window`.

                   parameters   gradients         optimizer states    bytes sent
    stage 1        P            P                 O / N               2 (N - 1) / N P
    stage 2        P            P / N + buckets   O / N               2 (N - 1) / N P

where P are the bytes of the parameters, and O those of one process' optimizer states.
What one gives up is adding up gradients before they are averaged: that needs all of
them on every rank. Every backward pass costs its reduce-scatter. Rajbhandari et al.
2020, "ZeRO", sections 5.2 and 7.2.1. Chapter 07.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from ddp_course.zero.stage1 import ZeroRedundancyOptimizer
from ddp_course.zero.window import WindowReducer

BUCKET_CAP_MB = 4


class ShardedGradientOptimizer(ZeroRedundancyOptimizer):
    """Runs `optimizer_class` on 1/N of all elements, with 1/N of states and gradients.

    As `ZeroRedundancyOptimizer`, but after `backward` there is only this rank's shard
    of the mean gradients, and every parameter's `grad` is None. So gradients are zeroed
    by this object's `zero_grad`, which must be called between `step` and the next
    backward: `module.zero_grad()` finds nothing to zero. There is no `no_sync`: every
    backward pass is averaged, and the means add up.

    Args:
        params, optimizer_class, process_group, parameters_as_bucket_view,
            overlap_with_ddp, first_bucket_mb, reduce_scatter, all_gather, defaults:
            as of `ZeroRedundancyOptimizer`.
        bucket_cap_mb: MiB at which a bucket is closed: what is on its way is not
            sharded, so buckets are smaller here.
        buckets_in_flight: how many buckets may have memory at once, 1 or more; with 1
            backward waits for every bucket.
        buckets_in_shared_memory: share parameters, and so many buckets, in memory that
            all ranks of one machine see; CPU only. It is taken until the process group
            ends.

    Raises:
        ReplicaError: as `ZeroRedundancyOptimizer`.
        RuntimeError: from `backward`, if the gradients of the last step are still
            there; as `ZeroRedundancyOptimizer`.

    PyTorch has no stage 2 of its own; FSDP's SHARD_GRAD_OP comes close. Rajbhandari et
    al. 2020, "ZeRO", section 5.2. Chapter 07.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = True,
        overlap_with_ddp: bool = False,
        *,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        first_bucket_mb: float | None = None,
        buckets_in_flight: int = 2,
        reduce_scatter: Callable[..., Any] | None = None,
        all_gather: Callable[..., Any] | None = None,
        buckets_in_shared_memory: bool = False,
        **defaults: Any,
    ) -> None:
        self.buckets_in_flight = buckets_in_flight
        super().__init__(
            params,
            optimizer_class,
            process_group,
            parameters_as_bucket_view,
            overlap_with_ddp,
            bucket_cap_mb=bucket_cap_mb,
            first_bucket_mb=first_bucket_mb,
            reduce_scatter=reduce_scatter,
            all_gather=all_gather,
            buckets_in_shared_memory=buckets_in_shared_memory,
            **defaults,
        )

    def problem(self) -> str | None:
        """Return what is wrong with the arguments, or None."""
        limit = self.buckets_in_flight
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            return f"buckets_in_flight is {limit!r}; it must be a whole number >= 1"
        return super().problem()

    def must_agree(self) -> dict[str, Any]:
        """Return the arguments that must be the same on all ranks."""
        return {**super().must_agree(), "buckets_in_flight": self.buckets_in_flight}

    def make_reducer(self) -> WindowReducer:
        """Return what averages the gradients."""
        return WindowReducer(
            self.process_group,
            self.reduce_scatter,
            self.buckets_in_flight,
            self.empty if self.in_shared_memory else None,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, or make them zeros, in the shard and elsewhere."""
        super().zero_grad(set_to_none)
        self.reducer.zero(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Refuse: gradients that are not averaged are whole, on every rank."""
        raise RuntimeError(
            "stage 2 keeps no whole gradients, so every backward pass is averaged, and "
            "their means add up; ZeroRedundancyOptimizer (stage 1) has no_sync"
        )
        yield

    def give_gradients(self) -> None:
        """Let what this rank owns see its part of the shards."""
        self.check_places()
        for parameter, owned in self.owned.items():
            owned.tensor.grad = self.reducer.means.get(parameter)

    def share_parameters(self) -> None:
        """Bring the shards of the parameters together again."""
        super().share_parameters()
        self.reducer.stepped = True
