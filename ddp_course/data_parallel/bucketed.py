"""DistributedDataParallel, the idea: buckets that leave while backward still computes.

The last layers' gradients are there first, and nobody needs to wait for the first
layers' to send them. So `naive`'s all-reduce is cut into buckets, each of which is sent
as soon as it is full. Who does that is the engine (`mechanisms.engine`, `buckets`);
this class gives it the buckets, and tells it which backward passes are to be averaged.
What else PyTorch's class can do is in `ddp`, on top of this. Chapter 05.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_course.mechanisms.agreement import start_as_replicas
from ddp_course.mechanisms.buckets import BUCKET_CAP_MB, FIRST_BUCKET_MB, bucket_plan
from ddp_course.mechanisms.engine import AllReduce, Engine
from ddp_course.mechanisms.frozen import Frozen
from ddp_course.mechanisms.hooks import Averager


class BucketedDistributedDataParallel(nn.Module):
    """Runs `module`, and averages its gradients in buckets while backward runs.

    Takes and returns what `module` does. When `backward` returns, every parameter's
    `grad` is the mean over the ranks, with the same bits on all of them. Where there is
    no gradient on some ranks, zero counts; if on none, the parameter is left alone.
    Buffers stay each rank's own.

    Arguments are as of `ddp.DistributedDataParallel`. Raises ReplicaError, on every
    rank, if the modules differ. Chapter 05.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        first_bucket_mb: float = FIRST_BUCKET_MB,
        all_reduce: Callable[..., Any] = dist.all_reduce,
    ) -> None:
        super().__init__()
        caps = {"bucket_cap_mb": bucket_cap_mb, "first_bucket_mb": first_bucket_mb}
        start_as_replicas(module, process_group, **caps)
        self.fill_buckets(module, AllReduce(process_group, all_reduce), **caps)

    def fill_buckets(self, module: nn.Module, ending: AllReduce, **caps: float) -> None:
        """Let the gradients of `module` travel in buckets, to what `ending` makes."""
        self.module = module
        self.engine = Engine(ending)
        self.require_backward_grad_sync = True
        parameters = dict(module.named_parameters())
        self.frozen = Frozen(module)
        for bucket in bucket_plan(parameters.items(), **caps):
            self.engine.add(bucket, parameters)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module, and note whether the backward that follows is averaged."""
        if torch.is_grad_enabled():
            self.frozen.check()
            self.engine.expecting = self.require_backward_grad_sync
        with self.engine.counted():
            return self.module(*inputs, **kwargs)

    __getstate__ = Averager.__getstate__

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
