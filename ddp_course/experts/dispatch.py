"""Experts on several ranks: send each token to its experts, and the outputs back.

Rank r of R has the experts from r E/R to (r + 1) E/R - 1. Each rank has its own tokens.
The rows that it sends are sorted by expert, so the rows for one rank are contiguous:

    count      how many rows each rank has for each expert: E integers
    dispatch   all-to-all of the rows, as many as each pair of ranks has counted
    compute    each rank runs its own experts on the rows of all ranks; these arrive
               sorted by rank, then by expert: R blocks for each expert
    combine    all-to-all back, and each token's weighted sum

Experts compute the blocks in this order. A kernel that needs one block for each expert
would have to sort the rows that arrive, and sort the outputs back: two more copies of
all rows.

No token is dropped, however unequal the loads are. A rank that sends m rows to others
and receives n sends m C numbers in dispatch and n C in combine. Backward sends as many:
m C through combine, then n C through dispatch. Lepikhin et al. 2020, "GShard",
arXiv:2006.16668. Chapter 17.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ddp_course.experts.segments import Segments

Group = dist.ProcessGroup | None  # None: all ranks
Exchange = Callable[[Tensor, Sequence[int], Sequence[int], Group], Tensor]


def all_to_all_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group = None
) -> Tensor:
    """Send `sent[r]` rows to each rank r; return the rows, `received[r]` from each r.

    The rows that are sent, and those that are returned, are in rank order.
    """
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    splits = list(received), list(sent)
    dist.all_to_all_single(arrived, rows.contiguous(), *splits, group)
    return arrived


class AllToAllRows(Function):
    """`all_to_all_rows`; in backward the gradients of the rows are sent back.

    PyTorch's own `all_to_all_single` would cut autograd's graph here, without an error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        group: Group,
        exchange: Exchange,
    ) -> Tensor:
        """Send the rows to their ranks."""
        ctx.exchange, ctx.back = exchange, (received, sent, group)
        return exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Send each row's gradient to the rank that the row came from."""
        back = AllToAllRows.apply(gradient, *ctx.back, ctx.exchange)
        return back, None, None, None, None


class TokenDispatcher:
    """A dispatcher of one batch of tokens to the ranks of their experts, and back.

    All ranks of the group must construct it together: it exchanges counts.

    Args:
        chosen: (N, k) int64, the experts of each of this rank's tokens; other ranks may
            have more tokens, or fewer, or none.
        num_experts: E, a multiple of the number of ranks.
        group: the ranks that share the experts; None means all.
        kept: (N, k) bool, the choices that are not dropped; None: all.
        exchange: sends the rows; `metered` has one that counts bytes.

    Attributes:
        sent, received: how many rows this rank sends to, and receives from, each rank.
        counts: how many rows each block has: the blocks of rank 0 for each of this
            rank's E/R experts, then the blocks of rank 1, and so on.
    """

    def __init__(
        self,
        chosen: Tensor,
        num_experts: int,
        group: Group = None,
        kept: Tensor | None = None,
        exchange: Exchange = all_to_all_rows,
    ) -> None:
        self.group, self.exchange = group, exchange
        self.segments = Segments(chosen, num_experts, kept)
        ones = [1] * dist.get_world_size(group)
        if num_experts % len(ones):
            raise ValueError(
                f"num_experts is {num_experts}, which {len(ones)} ranks cannot share "
                f"equally; it must be a multiple of {len(ones)}"
            )
        to_each = self.segments.counts.view(len(ones), -1)  # (R, E/R)
        from_each = exchange(to_each, ones, ones, group)  # rows by source rank, expert
        self.sent = to_each.sum(1).tolist()
        self.received = from_each.sum(1).tolist()
        self.counts = from_each.flatten().tolist()

    def dispatch(self, x: Tensor) -> Tensor:
        """Return the rows for this rank's experts, in blocks: (N, C) -> (M, C)."""
        rows = self.segments.sort(x)
        splits = self.sent, self.received
        return AllToAllRows.apply(rows, *splits, self.group, self.exchange)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return each token's weighted sum of its experts' outputs, (N, C).

        `rows`, (M, C), are the outputs for the rows that `dispatch` returned, in the
        same order; `weights` is (N, k).
        """
        splits = self.received, self.sent
        rows = AllToAllRows.apply(rows, *splits, self.group, self.exchange)
        return self.segments.sum(rows, weights)


def dispatched_mixture(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    compute: Callable[[Tensor, list[int]], Tensor],
    num_experts: int,
    group: Group = None,
    kept: Tensor | None = None,
    exchange: Exchange = all_to_all_rows,
) -> Tensor:
    """Return the mixture of this rank's tokens, (N, C).

    `compute(rows, counts)` runs this rank's experts: `rows`, (M, C), come from
    `TokenDispatcher.dispatch`, and `counts` is its list of the rows in each block;
    `compute` returns (M, C). The other arguments are those of `TokenDispatcher` and its
    methods.
    """
    dispatcher = TokenDispatcher(chosen, num_experts, group, kept, exchange)
    rows = compute(dispatcher.dispatch(x), dispatcher.counts)
    return dispatcher.combine(rows, weights)
