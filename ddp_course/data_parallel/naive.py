"""DistributedDataParallel, step one: as simple as it can be.

Every rank runs the same module on its own part of the batch. After backward the ranks
average their gradients, so every optimizer takes the same step, and the replicas stay
equal. That is data parallelism. The other steps make it faster, with fewer messages
(`flat`) and earlier ones (`bucketed`), or add what production needs (`ddp`).
Chapter 04.

This file checks nothing. If the ranks' modules differ, training hangs or computes wrong
results; if one rank fails, the others wait; a module wrapped twice averages twice; and
a parameter or buffer that is a slice of a larger tensor is not sent as a whole.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable


class NaiveDistributedDataParallel(nn.Module):
    """A wrapper that averages the gradients of `module` after each backward.

    Its inputs and outputs are those of `module`. No call is needed between backward and
    `optimizer.step()`. A rank without a gradient for a parameter contributes zeros.
    Each rank keeps its own buffers, such as BatchNorm's means.

    Args:
        module: has the same shapes on all ranks; all ranks get the first rank's values.
        process_group: the ranks that share a batch; None means all.
        all_reduce: any all-reduce of this course, or PyTorch's.

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
        self.waiting = False  # whether averaging is queued for the end of backward
        first = dist.get_process_group_ranks(process_group)[0]
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.data, first, process_group)
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._gradient_is_ready)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self.waiting = False  # a backward that failed leaves True behind
        return self.module(*inputs, **kwargs)

    def _gradient_is_ready(self, _: Tensor) -> None:
        """Queue the averaging; autograd calls this for every parameter."""
        if not self.waiting:
            self.waiting = True
            Variable._execution_engine.queue_callback(self._backward_has_ended)

    @torch.no_grad()
    def _backward_has_ended(self) -> None:
        """Replace every gradient with its mean over the ranks."""
        self.waiting = False
        for parameter in self.trained:
            if parameter.grad is None:  # other ranks may have one
                parameter.grad = torch.zeros_like(parameter)
        self.average([parameter.grad for parameter in self.trained])

    def average(self, gradients: list[Tensor]) -> None:
        """Replace the gradients with their means, one after the other."""
        for gradient in gradients:
            gradient.copy_(self.mean(gradient.contiguous()))

    def mean(self, tensor: Tensor) -> Tensor:
        """Average `tensor` over the ranks, in place, and return it."""
        self.all_reduce(tensor, group=self.process_group)
        return tensor.div_(dist.get_world_size(self.process_group))
