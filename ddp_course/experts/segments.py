"""Sort the rows of a batch by expert, so that each expert's rows are one segment.

    choices of four tokens, k = 1     2 0 2 1
    order                             token 1 | token 3 | tokens 0 and 2
    counts                            1         1         2

An expert then computes its segment, however long it is: nothing is dropped, and no row
is padded. That is the idea of Gale et al. 2022, "MegaBlocks", arXiv:2211.15841, whose
kernel computes all segments, padded to multiples of 128 rows, in one call. Chapter 17.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Segments:
    """The choices of a batch, sorted by expert, then by token.

    Args:
        chosen: (N, k) int64, the experts of each token.
        num_experts: E.
        kept: (N, k) bool, the choices that are computed; None: all.

    Attributes:
        order: (M,) int64, for each of the M kept choices, in sorted order, its index
            among the N k choices.
        counts: (E,) int64, the number of rows of each expert.
    """

    def __init__(
        self, chosen: Tensor, num_experts: int, kept: Tensor | None = None
    ) -> None:
        self.k, self.kept = chosen.shape[1], kept
        experts = chosen.flatten()
        if kept is not None:  # dropped choices come last, and are cut off
            experts = experts.where(kept.flatten(), num_experts)
        self.counts = torch.bincount(experts, minlength=num_experts)[:num_experts]
        num_rows = experts.numel() if kept is None else int(kept.sum())
        self.order = experts.argsort(stable=True)[:num_rows]
        self.place = self.order.argsort()  # the row of each kept choice, by token
        each = chosen.new_full((len(chosen),), self.k) if kept is None else kept.sum(1)
        self.first = each.cumsum(0) - each  # each token's first index in `place`

    def sort(self, x: Tensor) -> Tensor:
        """Copy each token to the rows of its experts: (N, C) -> (M, C)."""
        return x.index_select(0, self.order // self.k)

    def sum(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum of its rows: (M, C), (N, k) -> (N, C).

        A token gets zeros if all its choices are dropped. An embedding bag is such a
        sum of rows, without memory for the weighted rows.
        """
        weights = weights.flatten() if self.kept is None else weights[self.kept]
        how = {"mode": "sum", "per_sample_weights": weights}
        return F.embedding_bag(self.place, rows.to(weights.dtype), self.first, **how)


def compute_segments(
    experts: Sequence[Callable[[Tensor], Tensor]], rows: Tensor, counts: Sequence[int]
) -> Tensor:
    """Return the outputs of each expert for its segment of the sorted rows.

    If there are more segments than experts, the experts take turns: rows that have come
    from several ranks are sorted by rank, then by expert. An expert without rows
    computes an empty tensor: its parameters get gradients of zero, which other ranks
    may have to average.
    """
    experts = [*experts] * (len(counts) // len(experts))
    parts = rows.split(list(counts))
    return torch.cat([e(part) for e, part in zip(experts, parts, strict=True)])
