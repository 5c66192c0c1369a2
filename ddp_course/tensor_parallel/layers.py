"""Layers of which every rank has a part: Megatron-LM's column, row and vocabulary.

A product Y = X W can be cut in two ways (in PyTorch, which computes X Wᵀ, the *rows* of
`weight` are the columns of W):

    column   W = [W_0, W_1]    rank r computes its columns of Y from the whole of X
    row      W = [W_0; W_1]    rank r computes a summand of Y from its columns of X

One after the other they need one all-reduce in forward: the columns that rank r has
after the first are those that its part of the second wants. In backward, the gradient
of X comes from all ranks, which is one more. `naive` shows what it costs without.

A layer is made of the full one, which all ranks have, and keeps its slices of it:
`CUTS` says along which dimension each parameter is cut, or None if all have it.

megatron/core/tensor_parallel/layers.py; Shoeybi et al. 2019, section 3. Chapter 09.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_course.mechanisms.exchange import Group, exchange_of
from ddp_course.tensor_parallel.ops import (
    copies_to_group,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    scatter_sequence,
    split_to_group,
)
from ddp_course.tensor_parallel.products import column_product, row_product

Cuts = MappingProxyType[str, "int | None"]


class ParallelLayer(nn.Module):
    """A layer with this rank's slices of a full layer's parameters.

    Args:
        full: the same on all ranks; it stays as it is.
        group: the ranks that share the layer, or an exchange between them.

    Raises ValueError if a parameter cannot be cut into equal parts.
    """

    CUTS: ClassVar[Cuts] = MappingProxyType({})

    def __init__(self, full: nn.Module, group: Group) -> None:
        super().__init__()
        self.group = exchange_of(group)
        for name, parameter in full.named_parameters(recurse=False):
            own = part_of(parameter, self.CUTS[name], self.group.rank, self.group.size)
            copy = own.detach().clone(memory_format=torch.contiguous_format)
            setattr(self, name, nn.Parameter(copy, parameter.requires_grad))


def part_of(full: Tensor, dim: int | None, rank: int, size: int) -> Tensor:
    """Return rank's part of a full tensor that is cut along `dim`: a view.

    None is a tensor that every rank has whole. ValueError if it cannot be cut.
    """
    if dim is None:
        return full
    length = full.shape[dim]
    if length % size:
        fits = [n for n in range(1, length + 1) if length % n == 0]
        raise ValueError(
            f"{length} {('rows', 'columns')[dim]} of a weight cannot be cut into "
            f"{size} equal parts; it can be {', '.join(map(str, fits))}"
        )
    return full.narrow(dim, rank * (length // size), length // size)


class ColumnParallelLinear(ParallelLayer):
    """This rank's columns of Y = X W + b: (..., I) -> (..., O/tp).

    Args:
        full: the `nn.Linear` of I inputs and O outputs.
        group: the ranks that share it.
        gather_output: return the whole of Y, (..., O), on all ranks.
        sequence_parallel: X comes cut along the sequence: (B, T/tp, I).
    """

    CUTS = MappingProxyType({"weight": 0, "bias": 0})

    def __init__(
        self,
        full: nn.Linear,
        group: Group = None,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(full, group)
        self.bias = None if full.bias is None else self.bias
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Take the whole input; compute the own columns."""
        how = {"sequence_parallel": self.sequence_parallel}
        y = column_product(x, self.weight, self.bias, self.group, **how)  # (..., O/tp)
        return gather_from_group(y, -1, self.group) if self.gather_output else y


class RowParallelLinear(ParallelLayer):
    """Y = X W + b of this rank's columns of X: (..., I/tp) -> (..., O).

    Args:
        full: the `nn.Linear` of I inputs and O outputs.
        group: the ranks that share it.
        input_is_parallel: X comes cut, as `ColumnParallelLinear` leaves it; False takes
            the own part of a whole X, (..., I).
        sequence_parallel: return Y cut along the sequence: (B, T/tp, O).
    """

    CUTS = MappingProxyType({"weight": 1, "bias": None})

    def __init__(
        self,
        full: nn.Linear,
        group: Group = None,
        *,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(full, group)
        self.bias = None if full.bias is None else self.bias
        self.input_is_parallel = input_is_parallel
        self.sequence_parallel = sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Compute the own summand, add all ranks', then the bias: once."""
        if not self.input_is_parallel:
            x = split_to_group(x, -1, self.group)
        how = {"sequence_parallel": self.sequence_parallel}
        return row_product(x, self.weight, self.bias, self.group, **how)  # (..., O)


class VocabParallelEmbedding(ParallelLayer):
    """Embeds the tokens whose rows this rank has, and asks the others: () -> (C,).

    Every rank looks its own tokens up and has zeros for the others'; the sum is the
    whole. In backward each rank gets the gradients of its own rows, without a message.

    Args:
        full: the `nn.Embedding` of V tokens.
        group: the ranks that share it.
        sequence_parallel: (B, T) -> (B, T/tp, C), not (B, T, C).

    Raises ValueError for an embedding with options (padding_idx, max_norm, ...).
    """

    CUTS = MappingProxyType({"weight": 0})

    def __init__(
        self,
        full: nn.Embedding,
        group: Group = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        numbers = full.padding_idx, full.max_norm
        if numbers != (None, None) or full.sparse or full.scale_grad_by_freq:
            raise ValueError(f"{full} has options; only a plain embedding can be cut")
        super().__init__(full, group)
        self.sequence_parallel = sequence_parallel
        self.first = self.group.rank * self.weight.shape[0]  # the first own token

    def forward(self, idx: Tensor) -> Tensor:
        """Look the own tokens up, and add what the other ranks have found."""
        row = idx - self.first
        elsewhere = (row < 0) | (row >= self.weight.shape[0])
        found = F.embedding(row.masked_fill(elsewhere, 0), self.weight)  # (B, T, C)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        leave = scatter_sequence if self.sequence_parallel else reduce_from_group
        return leave(found, self.group)


class SequenceParallelLayerNorm(ParallelLayer):
    """LayerNorm of this rank's part of the sequence: (B, T/tp, C) -> (B, T/tp, C).

    Every rank has all of weight and bias, and uses them for its own positions: their
    gradients are summed over the group.
    """

    CUTS = MappingProxyType({"weight": None, "bias": None})

    def __init__(self, full: nn.LayerNorm, group: Group = None) -> None:
        super().__init__(full, group)
        self.shape, self.eps = full.normalized_shape, full.eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        weight, bias = copies_to_group([self.weight, self.bias], self.group)
        return F.layer_norm(x, self.shape, weight, bias, self.eps)


class SequenceParallelPositions(ParallelLayer):
    """The position embedding of this rank's part of the sequence: (T,) -> (T/tp, C)."""

    CUTS = MappingProxyType({"weight": None})

    def __init__(self, full: nn.Embedding, group: Group = None) -> None:
        super().__init__(full, group)

    def forward(self, positions: Tensor) -> Tensor:
        """Look the own positions up."""
        own = split_to_group(positions, 0, self.group)  # (T/tp,)
        return F.embedding(own, copy_to_group(self.weight, self.group))  # (T/tp, C)
