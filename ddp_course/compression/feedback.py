"""Error feedback: add what a compressor has left out to the next gradient.

    v = g + e        the gradient plus the earlier error
    send C(v)        the compressed sum
    e = v - C(v)     the new error

Add up the first and the last line over T steps: the sum of all C(v) is the sum of all
gradients minus the last e. So nothing is lost, only delayed, as long as e stays
bounded. Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847. Chapter 14.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ErrorFeedback:
    """This rank's errors, one for each bucket; none if `on` is False."""

    def __init__(self, on: bool = True) -> None:
        self.on = on
        self.memory: dict[int, Tensor] = {}

    def add(self, bucket: int, gradient: Tensor) -> Tensor:
        """Return v = g + e, which is stored in the memory until `keep`."""
        if not self.on:
            return gradient
        if bucket not in self.memory:
            self.memory[bucket] = torch.zeros_like(gradient)
        return self.memory[bucket].add_(gradient)

    def keep(self, bucket: int, v: Tensor, decoded: Tensor) -> None:
        """Store e = v - C(v); `decoded` has the numbers that C(v) represents."""
        if self.on:
            self.memory[bucket] = v.sub_(decoded)
