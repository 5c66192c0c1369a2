"""DistributedDataParallel, step three: send buckets while backward still computes.

Backward computes the gradients of the last layers first, and they can be sent before
those of the first layers are ready. So the gradients are divided into buckets, and each
bucket is all-reduced as soon as it is full. The engine does that (`mechanisms.engine`,
`buckets`); this class gives the engine its buckets, and tells it which backward passes
to average.

This file does not check, record or recover anything. Parts do that: objects with
methods that this class and its engine call at certain moments. `ddp` has a list of
parts. Chapter 05.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_course.mechanisms.broadcast import broadcast_all
from ddp_course.mechanisms.buckets import BUCKET_CAP_MB, FIRST_BUCKET_MB, bucket_plan
from ddp_course.mechanisms.engine import AllReduceBuckets, Engine
from ddp_course.mechanisms.hooks import Averager
from ddp_course.mechanisms.parts import announce


class BucketedDistributedDataParallel(nn.Module):
    """A wrapper that averages the gradients of `module` while backward runs.

    Its inputs and outputs are those of `module`. When `backward` returns, every
    parameter's `grad` is the mean over the ranks, with the same bits on all of them. A
    rank without a gradient for a parameter contributes zeros. Each rank keeps its own
    buffers.

    Args:
        parts: objects with methods named like the moments below or the engine's.
        all others: as in `ddp.DistributedDataParallel`.

    Besides the engine's moments, this class announces to its parts:

        before_replication(model)       the ranks' modules may still differ
        after_replication(model)        they are equal, and `model.engine` exists
        before_forward(model)
        after_forward(model, output)    unless forward raised

    Chapter 05.
    """

    reducer_class = AllReduceBuckets

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        first_bucket_mb: float = FIRST_BUCKET_MB,
        all_reduce: Callable[..., Any] = dist.all_reduce,
        parts: Iterable[Any] = (),
    ) -> None:
        super().__init__()
        self.module, self.process_group, self.parts = module, process_group, [*parts]
        self.require_backward_grad_sync = True
        announce(self.parts, "before_replication", self)
        groups: dict[Any, list[Tensor]] = {}  # an expert is not on all ranks
        for p in module.parameters():
            groups.setdefault(getattr(p, "replicas", process_group), []).append(p)
        for group, same in groups.items():
            broadcast_all(same, dist.get_process_group_ranks(group)[0], group)
        reducer = self.reducer_class(process_group, all_reduce)
        self.engine = Engine(reducer, self.parts)
        parameters = dict(module.named_parameters())
        for plan in bucket_plan(parameters.items(), bucket_cap_mb, first_bucket_mb):
            self.engine.add(plan, parameters)
        announce(self.parts, "after_replication", self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and decide whether the next backward is averaged."""
        if torch.is_grad_enabled():
            self.engine.expecting = self.require_backward_grad_sync
        announce(self.parts, "before_forward", self)
        output = self.module(*inputs, **kwargs)
        announce(self.parts, "after_forward", self, output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate, without averaging, the gradients of forward passes in this block.

        The next averaged backward pass averages the accumulated sum. The forward must
        be inside the block; its backward may run later.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    __getstate__ = Averager.__getstate__  # raises: a copy would average nothing
