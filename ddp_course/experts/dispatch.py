"""Experts on several ranks: send each token to its experts, and the results back.

Rank r of R has the experts [r E / R, (r + 1) E / R). Each rank has its own tokens. The
rows that are exchanged are sorted by expert, so the rows for one rank lie together:

    count      how many rows each rank sends to each expert: E integers
    dispatch   all-to-all of the rows, with unequal splits
    compute    each rank its experts, on the rows of all ranks
    combine    all-to-all back; weights; sum over a token's k experts

Nothing is dropped, however unequal the loads are. Each rank sends m C and n C numbers,
where it hands m rows to others and gets n from them; backward sends the same again.
Lepikhin et al. 2020, "GShard", arXiv:2006.16668; Gale et al. 2022, "MegaBlocks",
arXiv:2211.15841, for the sorted segments. Chapter 17.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup | None  # None: all ranks


class AllToAllRows(Function):
    """Send each rank its rows; in backward, their gradients go back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, out: Sequence[int], into: Sequence[int], group: Group
    ) -> Tensor:
        """Send `out[r]` rows to rank r, and receive `into[r]` rows of it."""
        ctx.way = into, out, group
        return all_to_all_rows(rows, out, into, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Send back."""
        return all_to_all_rows(gradient, *ctx.way), None, None, None


def all_to_all_rows(
    rows: Tensor, out: Sequence[int], into: Sequence[int], group: Group = None
) -> Tensor:
    """Return the rows of all ranks for this one, in the order of the ranks."""
    arrived = rows.new_empty((sum(into), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), list(into), list(out), group)
    return arrived


def dispatched(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    compute: Callable[[Tensor, list[int]], Tensor],
    num_experts: int,
    group: Group = None,
) -> Tensor:
    """Return the mixture of this rank's tokens, (N, C).

    Args:
        x: (N, C), this rank's tokens; other ranks may have more or fewer, or none.
        chosen: (N, k) int64, the experts of each token.
        weights: (N, k); a choice of weight 0 is sent, too.
        compute: called with the rows of this rank's experts, sorted by expert, and how
            many there are of each; returns as many rows.
        num_experts: E, a multiple of the number of ranks.
        group: the ranks that share the experts; None are all.
    """
    ranks, k = dist.get_world_size(group), chosen.shape[1]
    order = chosen.flatten().argsort(stable=True)  # by expert, then by token
    out = torch.bincount(chosen.flatten(), minlength=num_experts).view(ranks, -1)
    into = torch.empty_like(out)
    dist.all_to_all_single(into, out, group=group)  # (R, E/R): what each rank sends
    ways = out.sum(1).tolist(), into.sum(1).tolist()

    rows = AllToAllRows.apply(x[order // k], *ways, group)  # dispatch
    by_expert = _sorting(into)  # they arrive by rank, and then by expert
    rows = compute(rows[by_expert], into.sum(0).tolist())
    rows = rows[by_expert.argsort()]
    rows = AllToAllRows.apply(rows, *ways[::-1], group)  # combine
    weighed = rows * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // k, weighed.to(x.dtype))


def _sorting(counts: Tensor) -> Tensor:
    """Return the order that sorts rows by expert, which lie by rank and expert.

    `counts` is (R, E/R): how many rows each rank has sent to each expert.
    """
    experts = torch.arange(counts.shape[1], device=counts.device).expand_as(counts)
    return experts.flatten().repeat_interleave(counts.flatten()).argsort(stable=True)
