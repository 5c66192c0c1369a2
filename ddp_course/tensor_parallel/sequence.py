"""Sequence parallelism: outside of the regions each rank has T/tp of the tokens.

Between two parallel regions every rank would compute the same norm, residual and
dropout of all tokens, and keep the same activations for backward. Instead each has its
part of the sequence; the regions are entered by `gather_sequence` and left by
`scatter_sequence`, which together send what one all-reduce does. Parameters there are
whole on all ranks, but each uses them for its own tokens only: so their gradients are
summed over the group. That is easily forgotten, and nothing but the numbers shows it.

Korthikanti et al. 2022, section 4.2.2. Chapter 09.
"""

from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.mechanisms.exchange import Group
from ddp_course.tensor_parallel.layers import ParallelLayer, copy_to_group
from ddp_course.tensor_parallel.ops import split_to_group


class SequenceParallelLayerNorm(ParallelLayer):
    """LayerNorm of this rank's part of the sequence: (B, T/tp, C) -> (B, T/tp, C)."""

    CUTS = MappingProxyType({"weight": None, "bias": None})

    def __init__(self, full: nn.LayerNorm, group: Group = None) -> None:
        super().__init__(full, group)
        self.shape, self.eps = full.normalized_shape, full.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise. Both gradients are summed in one all-reduce."""
        both = copy_to_group(torch.cat([self.weight, self.bias]), self.group)
        return F.layer_norm(x, self.shape, *both.chunk(2), self.eps)


class SequenceParallelPositions(ParallelLayer):
    """The position embedding of this rank's part of the sequence: (T,) -> (T/tp, C)."""

    CUTS = MappingProxyType({"weight": None})

    def forward(self, positions: Tensor) -> Tensor:
        """Look the own positions up."""
        own = split_to_group(positions, 0, self.group)  # (T/tp,)
        return F.embedding(own, copy_to_group(self.weight, self.group))  # (T/tp, C)
