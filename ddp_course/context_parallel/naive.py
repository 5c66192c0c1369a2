"""Attention over a divided sequence: every rank gathers all keys and values.

Everything in a transformer but attention treats each position alone. A query, however,
looks at the keys and values of all earlier positions. Here every rank gathers all of
them, and computes its own queries' rows.

    sent by each rank    forward (N - 1) u, backward (N - 1) u
    kept by each rank    N u: the keys and values of the whole sequence

u is the number of bytes of one rank's keys and values. Llama 3 is trained in this way:
with few key and value heads, u is small.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

Group = dist.ProcessGroup | None  # None: all ranks


class GatherSequence(Function):
    """The parts of all ranks, one after the other along dim 2.

    In backward every rank has a gradient for every part, since its queries have seen
    them all. The owner of a part gets their sum. That is a reduce-scatter; it is done
    by an all-to-all and a sum, as gloo's own reduce-scatter sends twice the bytes.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Group) -> Tensor:
        """All-gather: (..., T/N, D) -> (..., T, D)."""
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Send each owner its part of the gradient, and add up what arrives."""
        parts = gradient.chunk(dist.get_world_size(ctx.group), dim=2)
        outgoing = torch.stack(parts)  # (N, B, H, T/N, D)
        arrived = torch.empty_like(outgoing)
        dist.all_to_all_single(arrived, outgoing, group=ctx.group)
        return arrived.sum(0), None


def gathered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Sequence[Tensor],
    group: Group = None,
) -> Tensor:
    """Return causal attention for this rank's queries, (B, H, T/N, D).

    Args:
        q, k, v: (B, H, T/N, D), this rank's part of the sequence; k and v may have
            fewer heads, each of which serves several heads of q.
        positions: the positions of each rank, (T/N,) int64, in the order of the ranks.
        group: the ranks that share the sequence; None means all.
    """
    keys, values = GatherSequence.apply(torch.stack((k, v)).flatten(0, 1), group).chunk(
        2
    )
    mine = positions[dist.get_rank(group)]
    visible = mine[:, None] >= torch.cat(tuple(positions))  # (T/N, T)
    return F.scaled_dot_product_attention(
        q, keys, values, attn_mask=visible, enable_gqa=k.shape[1] != q.shape[1]
    )
