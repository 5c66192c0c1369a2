"""DistributedDataParallel in its second step: all gradients in one message.

As `naive` it begins when backward has ended. Chapter 04.
"""

import torch
from torch import Tensor

from ddp_course.data_parallel.naive import NaiveDistributedDataParallel


class FlatDistributedDataParallel(NaiveDistributedDataParallel):
    """The same with one all-reduce (one for each type) instead of hundreds.

    It pays the latency once; the price is a copy there and back. Chapter 04.
    """

    def average(self, gradients: list[Tensor]) -> None:
        """Replace gradients by their means, all at once."""
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            members = [gradient for gradient in gradients if gradient.dtype == dtype]
            flat = torch.cat([gradient.flatten() for gradient in members])
            self.mean(flat)
            parts = flat.split([gradient.numel() for gradient in members])
            for gradient, part in zip(members, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
