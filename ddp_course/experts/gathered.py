"""Experts on several ranks, the simple way: every rank sees the tokens of all ranks.

Rank r of R has E/R of the experts. All ranks gather all tokens; each rank computes the
outputs of its own experts; each token's owner adds up the parts of its mixture.

    sent by each rank    forward 2 (R - 1) N C numbers, backward the same

with N tokens of C channels on each rank. A rank sends each token to all other ranks,
even if the token has chosen few experts; `dispatch` sends it only to these experts.
Chapter 17.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup | None  # None: all ranks


def gather_rows(rows: Tensor, group: Group = None) -> Tensor:
    """Return the rows of all ranks, one rank after the other: (N, ...) -> (RN, ...)."""
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, rows.contiguous(), group)
    return torch.cat(parts)


def sum_for_owners(rows: Tensor, group: Group = None) -> Tensor:
    """Send each rank its part of the rows, and add up the parts that arrive.

    (RN, ...) -> (N, ...). That is a reduce-scatter, done by an all-to-all and a sum,
    because gloo's own reduce-scatter sends twice the bytes.
    """
    rows = rows.contiguous()
    arrived = torch.empty_like(rows)
    dist.all_to_all_single(arrived, rows, group=group)
    return arrived.unflatten(0, (dist.get_world_size(group), -1)).sum(0)


class GatherRows(Function):
    """`gather_rows`; in backward, `sum_for_owners`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        """Gather the rows of all ranks."""
        ctx.group = group
        return gather_rows(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Add up the gradients that all ranks have for this rank's rows."""
        return SumForOwners.apply(gradient, ctx.group), None


class SumForOwners(Function):
    """`sum_for_owners`; in backward, `gather_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        """Add up the rows that all ranks have for this rank."""
        ctx.group = group
        return sum_for_owners(rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Gather the gradients of all ranks' sums."""
        return GatherRows.apply(gradient, ctx.group), None


def gathered_mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    expert: Callable[[int, Tensor], Tensor],
    num_experts: int,
    group: Group = None,
) -> Tensor:
    """Return the mixture of this rank's tokens, (N, C).

    Args:
        x: (N, C), this rank's tokens; all ranks have equally many.
        chosen: (N, k) int64, the experts of each token.
        weights: (N, k).
        expert: called with the number of one of this rank's experts, from 0 to
            E/R - 1, and the tokens that chose it, (n, C); returns (n, C).
        num_experts: E, a multiple of the number of ranks.
        group: the ranks that share the experts; None means all.
    """
    each = num_experts // dist.get_world_size(group)
    first = dist.get_rank(group) * each
    tokens, chosen = GatherRows.apply(x, group), gather_rows(chosen, group)
    weights = GatherRows.apply(weights, group)
    y = torch.zeros_like(tokens)
    for number in range(each):
        token, choice = (chosen == first + number).nonzero(as_tuple=True)
        output = weights[token, choice, None] * expert(number, tokens[token])
        y = y.index_add(0, token, output)
    return SumForOwners.apply(y, group)
