"""DistributedDataParallel, step two: all gradients in one all-reduce.

Like `naive`, it averages after backward has ended. Chapter 04.
"""

import torch
from torch import Tensor

from ddp_course.data_parallel.naive import NaiveDistributedDataParallel


class FlatDistributedDataParallel(NaiveDistributedDataParallel):
    """A DDP with one all-reduce for each dtype instead of one for each parameter.

    It pays the latency once for each dtype, but copies every gradient twice: into the
    message, and back. Chapter 04.
    """

    def average(self, gradients: list[Tensor]) -> None:
        """Replace the gradients with their means; send one message for each dtype."""
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            members = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in members])
            self.mean(flat)
            parts = flat.split([gradient.numel() for gradient in members])
            for gradient, part in zip(members, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
