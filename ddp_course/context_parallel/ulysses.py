"""Ulysses: exchange parts of the sequence for some of the heads, and back.

Heads are independent of each other. So an all-to-all sends every rank the whole
sequence of 1/N of the heads; each rank computes attention as one process would; a
second all-to-all sends the outputs back:

    rank 0   positions 0-31, heads 0-11        heads 0-5,  positions 0-63
    rank 1   positions 32-63, heads 0-11  ->   heads 6-11, positions 0-63

No rank can have less than a head, so there are at most as many ranks as heads of keys.
Sent by each rank, in forward and again in backward: (N - 1) / N of its queries, keys,
values and outputs. Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup | None  # None: all ranks


class HeadExchange(Function):
    """An all-to-all of pieces that are cut along one dimension, joined along another.

    Its backward is the exchange in the other direction.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, join: int, group: Group) -> Tensor:
        """Exchange: dimension `cut` becomes N times shorter, `join` N times longer."""
        ctx.way = join, cut, group
        return exchange(x, cut, join, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Exchange in the other direction."""
        return exchange(gradient, *ctx.way), None, None, None


def exchange(x: Tensor, cut: int, join: int, group: Group = None) -> Tensor:
    """Send every rank its piece along `cut`; join what arrives along `join`."""
    pieces = torch.stack(x.chunk(dist.get_world_size(group), dim=cut))  # contiguous
    arrived = torch.empty_like(pieces)
    dist.all_to_all_single(arrived, pieces, group=group)
    return torch.cat(arrived.unbind(), dim=join)


def ulysses_attention(q: Tensor, k: Tensor, v: Tensor, group: Group = None) -> Tensor:
    """Return causal attention for this rank's queries, (B, H, T/N, D).

    Args:
        q, k, v: (B, H, T/N, D), contiguous parts of the sequence, in the order of the
            ranks; k and v may have fewer heads.
        group: the ranks that share the sequence; None means all.

    Raises ValueError, before anything is sent, if the heads cannot be divided.
    """
    n = dist.get_world_size(group)
    for name, x in (("q", q), ("k", k)):
        if x.shape[1] % n:
            raise ValueError(
                f"{name} has {x.shape[1]} heads, which {n} ranks cannot share equally; "
                "take a number of ranks that divides them, or ring attention"
            )
    q, k, v = (HeadExchange.apply(x, 1, 2, group) for x in (q, k, v))  # (B, H/N, T, D)
    grouped = k.shape[1] != q.shape[1]
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    return HeadExchange.apply(y, 2, 1, group)
