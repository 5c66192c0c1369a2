"""DistributedDataParallel, the idea: buckets that leave while backward still computes.

The last layers' gradients are there first, and nobody needs to wait for the first
layers' to send them. So `naive`'s all-reduce is cut into buckets, each of which is sent
as soon as it is full. The engine does that (`mechanisms.engine`, `buckets`); this class
gives the engine its buckets, and says which backward passes are to be averaged.

Nothing is checked here, recorded or recovered. Whatever does so is a part: an object to
which this class and its engine announce their moments. `ddp` has a list of them.
Chapter 05.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.mechanisms.broadcast import broadcast_all
from ddp_course.mechanisms.buckets import BUCKET_CAP_MB, FIRST_BUCKET_MB, bucket_plan
from ddp_course.mechanisms.engine import AllReduceBuckets, Engine
from ddp_course.mechanisms.hooks import Averager
from ddp_course.mechanisms.parts import announce


class BucketedDistributedDataParallel(nn.Module):
    """Runs `module`, and averages its gradients in buckets while backward runs.

    Takes and returns what `module` does. When `backward` returns, every parameter's
    `grad` is the mean over the ranks, with the same bits on all of them. Where there is
    no gradient, zero counts. Buffers stay each rank's own.

    Args:
        parts: what is told of the moments below, and of those of the engine.
        all others: as of `ddp.DistributedDataParallel`.

    It announces, beside what the engine does:

        before_replication(model)       the ranks' modules may differ still
        after_replication(model)        they are equal, and there is an engine
        before_forward(model)
        after_forward(model, output)    unless forward has raised

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
        first = dist.get_process_group_ranks(process_group)[0]
        broadcast_all(module.parameters(), first, process_group)
        reducer = self.reducer_class(process_group, all_reduce)
        self.engine = Engine(reducer, self.parts)
        parameters = dict(module.named_parameters())
        for plan in bucket_plan(parameters.items(), bucket_cap_mb, first_bucket_mb):
            self.engine.add(plan, parameters)
        announce(self.parts, "after_replication", self)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and note whether the backward that follows is averaged."""
        if torch.is_grad_enabled():
            self.engine.expecting = self.require_backward_grad_sync
        announce(self.parts, "before_forward", self)
        output = self.module(*inputs, **kwargs)
        announce(self.parts, "after_forward", self, output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate the gradients of what is run forward in this block.

        They stay this rank's own until the next averaged backward pass, which averages
        their sum. It is the forward that must be inside.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    __getstate__ = Averager.__getstate__  # raises: a copy would average nothing
