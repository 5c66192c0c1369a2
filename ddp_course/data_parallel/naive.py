"""DistributedDataParallel in its first step: as simple as it can be.

Every rank runs the same module on its own part of the batch. After backward the ranks
average their gradients, so every optimizer takes the same step, and the replicas stay
equal. That is all there is to data parallelism; the rest is speed: fewer messages
(`flat`), and earlier ones (`bucketed`). Explained in chapter 04.
"""

from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from ddp_course.mechanisms.agreement import on_any_rank, start_as_replicas
from ddp_course.mechanisms.frozen import Frozen
from ddp_course.mechanisms.hooks import Averager, on_gradient
from ddp_course.mechanisms.timeline import Timeline


class NaiveDistributedDataParallel(Averager, nn.Module):
    """Runs `module`, and averages its gradients over the ranks after each backward.

    Takes and returns what `module` does. No call is needed between backward and
    `optimizer.step()`. Where a parameter has no gradient on some ranks, zero counts; if
    it has none on any, it is left alone. Buffers, such as BatchNorm's means, stay each
    rank's own.

    Args:
        module: the same on all ranks; rank 0's numbers are taken.
        process_group: the ranks that share a batch; None are all.
        all_reduce: any of this course, or PyTorch's.

    Raises ReplicaError, on every rank, if the modules differ. Chapter 04.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] = dist.all_reduce,
    ) -> None:
        super().__init__()
        start_as_replicas(module, process_group)
        self.module = module
        self.process_group = process_group
        self.all_reduce = all_reduce
        self.frozen = Frozen(module)
        self.trained = [p for p in module.parameters() if p.requires_grad and p.numel()]
        self.waiting = False  # for the end of backward
        self.timeline = Timeline(())
        for parameter in self.trained:
            on_gradient(parameter, self._gradient_is_there)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self.frozen.check()
        self.failed += self.waiting  # then the last backward has not ended
        self.waiting = False
        with self.counted():
            return self.module(*inputs, **kwargs)

    def _gradient_is_there(self) -> None:
        """Autograd calls this for every parameter; the first call asks for the end."""
        if not self.waiting and not self.held:
            self.waiting = True
            self.timeline = Timeline.begin()
            Variable._execution_engine.queue_callback(self._backward_has_ended)

    def _backward_has_ended(self) -> None:
        self.waiting = False
        self.timeline.computed()
        self.average()
        self.timeline.all_ended()

    @torch.no_grad()
    def average(self) -> None:
        """Replace every gradient by its mean over the ranks."""
        there = [parameter.grad is not None for parameter in self.trained]
        used = on_any_rank(there, self.process_group, self.failed)
        averaged = list(compress(self.trained, used))
        for parameter in averaged:
            if parameter.grad is None:  # other ranks have one, and wait for us
                parameter.grad = torch.zeros_like(parameter)
        self.all_means([parameter.grad for parameter in averaged])

    def all_means(self, gradients: list[Tensor]) -> None:
        """Replace gradients by their means, one after the other."""
        for gradient in gradients:
            gradient.copy_(self.mean(gradient.contiguous()))

    def mean(self, tensor: Tensor) -> Tensor:
        """Replace `tensor`, in place, by its mean over the ranks, and return it."""
        start = self.timeline.now()
        work = self.all_reduce(tensor, group=self.process_group, async_op=True)
        self.timeline.sent(work, tensor.nbytes, start)
        work.wait()
        return tensor.div_(dist.get_world_size(self.process_group))
