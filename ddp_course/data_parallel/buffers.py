"""A part of DDP: broadcast rank 0's buffers, such as BatchNorm's means, to all ranks.

Buffers are sent at construction, and before each forward, unless the previous forward
ran in `no_sync` or without gradients: PyTorch's rule. Chapter 05.
"""

from typing import Any

import torch
import torch.distributed as dist

from ddp_course.mechanisms.broadcast import broadcast_all


class Buffers:
    """A part of DDP that broadcasts the buffers of the group's first rank."""

    def __init__(self) -> None:
        self.due = True  # whether to send the buffers before the next forward

    def after_replication(self, model: Any) -> None:
        """Send the buffers with which training begins."""
        self.send(model)

    def before_forward(self, model: Any) -> None:
        """Send the buffers if the previous forward's backward was to be averaged."""
        if self.due:
            self.send(model)
        self.due = torch.is_grad_enabled() and model.require_backward_grad_sync

    def send(self, model: Any) -> None:
        """Overwrite every rank's buffers with those of the first rank."""
        group = model.process_group
        first = dist.get_process_group_ranks(group)[0]
        broadcast_all(model.module.buffers(), first, group)
