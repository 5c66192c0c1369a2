"""A part of DDP: all ranks get rank 0's buffers, such as BatchNorm's means.

They are sent at construction, and before each forward, unless the last forward was in
`no_sync` or recorded no gradients: PyTorch's rule. Chapter 05.
"""

from typing import Any

import torch
import torch.distributed as dist

from ddp_course.mechanisms.broadcast import broadcast_all


class Buffers:
    """Broadcasts the buffers of the group's first rank."""

    def __init__(self) -> None:
        self.due = True  # before the next forward

    def after_replication(self, model: Any) -> None:
        """Send the buffers with which training begins."""
        self.send(model)

    def before_forward(self, model: Any) -> None:
        """Send them if the last forward was averaged."""
        if self.due:
            self.send(model)
        self.due = torch.is_grad_enabled() and model.require_backward_grad_sync

    def send(self, model: Any) -> None:
        """Overwrite all ranks' buffers by those of the first rank."""
        group = model.process_group
        first = dist.get_process_group_ranks(group)[0]
        broadcast_all(model.module.buffers(), first, group)
