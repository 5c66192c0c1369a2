"""DistributedDataParallel in its first step: as simple as it can be.

Every rank runs the same module on its own part of the batch. After backward the ranks
average their gradients, so every optimizer takes the same step, and the replicas stay
equal. That is all there is to data parallelism; the rest is speed: fewer messages
(`flat`), and earlier ones (`bucketed`), and what production needs (`ddp`). Chapter 04.

Nothing is checked here. If the ranks' modules differ, training hangs or goes wrong; if
one rank fails, the others wait; whoever wraps a module twice averages twice.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable


class NaiveDistributedDataParallel(nn.Module):
    """Runs `module`, and averages its gradients over the ranks after each backward.

    Takes and returns what `module` does. No call is needed between backward and
    `optimizer.step()`. A parameter that a rank has no gradient for counts as zero.
    Buffers, such as BatchNorm's means, stay each rank's own.

    Args:
        module: of the same form on all ranks; every rank gets the first rank's numbers.
        process_group: the ranks that share a batch; None means all.
        all_reduce: any of this course, or PyTorch's.

    Chapter 04.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        all_reduce: Callable[..., Any] = dist.all_reduce,
    ) -> None:
        super().__init__()
        self.module, self.process_group = module, process_group
        self.all_reduce = all_reduce
        self.trained = [p for p in module.parameters() if p.requires_grad and p.numel()]
        self.waiting = False  # for the end of backward
        first = dist.get_process_group_ranks(process_group)[0]
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, first, process_group)
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self.waiting = False  # True would be left of a backward that has failed
        return self.module(*inputs, **kwargs)

    def _gradient_is_ready(self, _: Tensor) -> None:
        """Queue the averaging; autograd calls this for every parameter."""
        if not self.waiting:
            self.waiting = True
            Variable._execution_engine.queue_callback(self._backward_has_ended)

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        """Replace every gradient by its mean over the ranks."""
        self.waiting = False
        for parameter in self.trained:
            if parameter.grad is None:  # other ranks may have one
                parameter.grad = torch.zeros_like(parameter)
        self.average([parameter.grad for parameter in self.trained])

    def average(self, gradients: list[Tensor]) -> None:
        """Replace gradients by their means, one after the other."""
        for gradient in gradients:
            gradient.copy_(self.mean(gradient.contiguous()))

    def mean(self, tensor: Tensor) -> Tensor:
        """Replace `tensor`, in place, by its mean over the ranks, and return it."""
        self.all_reduce(tensor, group=self.process_group)
        return tensor.div_(dist.get_world_size(self.process_group))
