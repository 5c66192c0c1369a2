"""Error feedback: what a compressor leaves out now, it is given again next time.

    v = g + e        the gradient, and what was left out before
    send C(v)
    e = v - C(v)     what is left out now

Add up the first and the last line over T steps: the sum of all that was sent is the sum
of all gradients, less the last e. Nothing is lost, it only comes later, as long as e
stays bounded. Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847. Chapter 14.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ErrorFeedback:
    """This rank's memory of what was left out, by bucket; none if `on` is False."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.memory: dict[int, Tensor] = {}

    def add(self, bucket: int, gradient: Tensor) -> Tensor:
        """Return v = g + e; the memory holds it, until `keep`."""
        if not self.on:
            return gradient
        if bucket not in self.memory:
            self.memory[bucket] = torch.zeros_like(gradient)
        return self.memory[bucket].add_(gradient)

    def keep(self, bucket: int, v: Tensor, sent: Tensor) -> None:
        """Remember e = v - C(v), where `sent` is what C(v) stands for."""
        if self.on:
            self.memory[bucket] = v.sub_(sent)
